"""What ``gae`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.gae import GaeCall, GaeResults
from rlkernel.reference import unsupported as unsupported


def forward(call: GaeCall) -> GaeResults:
    rewards, values, mask, gamma, lam, cu_seqlens, last_values, holes = call
    kept = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    if cu_seqlens is not None:
        rows, places = _places(cu_seqlens)
        r, v, k = (_padded(x, rows, places, len(cu_seqlens) - 1) for x in (rewards, values, kept))
        results = forward(call._replace(rewards=r, values=v, mask=k, cu_seqlens=None))
        return GaeResults(*(x[rows, places] for x in results))
    next_value = rewards.new_zeros(len(rewards)) if last_values is None else last_values
    carry = rewards.new_zeros(len(rewards))
    decay = gamma * (lam.to(rewards.dtype) if isinstance(lam, Tensor) else lam)
    counted = torch.ones_like(kept) if holes == "zero" else kept
    rewards, values = torch.where(kept, rewards, 0), torch.where(kept, values, 0)
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        value, counts = values[:, t], counted[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        advantage = delta + decay * carry
        advantages[:, t] = torch.where(kept[:, t], advantage, 0)
        returns[:, t] = torch.where(kept[:, t], advantage + value, 0)
        carry, next_value = torch.where(counts, advantage, carry), torch.where(counts, value, next_value)
    return GaeResults(advantages, returns)


def _places(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of every packed token, and its place in there."""
    lengths = cu_seqlens.diff()
    rows = torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)
    return rows, torch.arange(len(rows), device=cu_seqlens.device) - cu_seqlens[rows]


def _padded(packed: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    length = int(places.max()) + 1 if len(places) else 0
    padded = packed.new_zeros(count, length)
    padded[rows, places] = packed
    return padded


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    masked: float = 0.2,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.gae`` for ``shape`` [B, L]: a small penalty on every token, a reward at
    the end, and a share of ``masked`` tokens, those behind the end included."""
    b, length = shape
    g = torch.Generator(device).manual_seed(seed)
    rewards = -0.01 * torch.rand(shape, generator=g, dtype=torch.float32, device=device)
    rewards[:, -1:] += torch.randn((b, min(length, 1)), generator=g, dtype=torch.float32, device=device)
    values = (
        torch.randn(shape, generator=g, dtype=torch.float32, device=device).cumsum(1) / max(length, 1) ** 0.5
    )
    mask = torch.rand(shape, generator=g, dtype=torch.float32, device=device) >= masked
    return {"rewards": rewards.to(dtype), "values": values.to(dtype), "mask": mask}
