"""What ``kl_shaped_rewards`` means, in plain PyTorch; in fp64 it is the truth."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall, KlShapedRewardsResults
from rlkernel.reference import unsupported as unsupported


def forward(call: KlShapedRewardsCall) -> KlShapedRewardsResults:
    rewards, logprobs, kl_input, kl_output = call.rewards, call.logprobs, call.kl_input, call.kl_output
    kept = torch.ones_like(logprobs, dtype=torch.bool) if call.mask is None else call.mask
    d = (logprobs - call.ref_logprobs).clamp(-kl_input, kl_input)
    kl = {"k1": d, "abs": d.abs(), "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[call.kl_estimator]
    kl = kl.clamp(-kl_output, kl_output)
    per_token = _at_the_last(rewards, kept, call.cu_seqlens) if call.per_sequence else rewards
    return KlShapedRewardsResults(torch.where(kept, per_token - call.beta * kl, 0))


def _at_the_last(rewards: Tensor, kept: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """One reward per sequence, at the last token of it that counts; 0 elsewhere."""
    if cu_seqlens is None:
        behind = kept.flip(1).cumsum(1).flip(1)  # tokens that count, from here to the end of the row
        return torch.where(kept & (behind == 1), rewards[:, None], 0)
    token = torch.arange(len(kept), device=kept.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    seen = torch.cat([token.new_zeros(1), kept.cumsum(0)])  # tokens that count before each
    last = kept & (seen[1:] == seen[cu_seqlens[sequence + 1]])
    return torch.where(last, rewards[sequence], 0)


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    masked: float = 0.2,
) -> dict[str, Any]:
    """Keyword arguments of ``rlkernel.kl_shaped_rewards`` for logprobs of ``shape`` [B, L]."""
    g = torch.Generator(device).manual_seed(seed)
    logprobs = torch.empty(shape, dtype=torch.float32, device=device).exponential_(generator=g).neg_()
    drift = 0.1 * torch.randn(shape, generator=g, dtype=torch.float32, device=device)
    rewards = torch.randn(shape[0], generator=g, dtype=torch.float32, device=device)
    mask = torch.rand(shape, generator=g, dtype=torch.float32, device=device) >= masked
    floats = {"rewards": rewards, "logprobs": logprobs, "ref_logprobs": logprobs + drift}
    return {name: x.to(dtype) for name, x in floats.items()} | {"mask": mask, "beta": 0.05}
