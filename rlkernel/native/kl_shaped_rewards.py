"""``kl_shaped_rewards`` over the compiled extension, on CPU, CUDA or HIP by device, in one launch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels, kernels_for


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    wide = any(x.dtype == torch.float64 for x in tensors[:3])
    reasons = ["rewards and logprobs must be at most fp32, got float64"] if wide else []
    found = kernels_for(tensors[0].device)
    return [*reasons, found] if isinstance(found, str) else reasons


def forward(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    beta: float,
    kl_estimator: str,
    kl_input: float,
    kl_output: float,
    per_sequence: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    out = torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)
    kernels(logprobs.device).kl_shaped_rewards(
        rewards=rewards, per_sequence=per_sequence, logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask,
        cu_seqlens=cu_seqlens, beta=beta, kl_input=kl_input, kl_output=kl_output, estimator=kl_estimator,
        out=out,
    )  # fmt: skip
    return out
