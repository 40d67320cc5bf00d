"""``gae`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels, kernels_for


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = [
        f"rewards and values must be at most fp32, got {str(x.dtype).removeprefix('torch.')}"
        for x in tensors[:2]
        if x.dtype == torch.float64
    ][:1]
    found = kernels_for(tensors[0].device)
    return [*reasons, found] if isinstance(found, str) else reasons


def forward(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    gamma: float,
    lam: float,
    cu_seqlens: Tensor | None,
    last_values: Tensor | None,
    lams: Tensor | None = None,
    zero_holes: bool = False,
) -> tuple[Tensor, Tensor]:
    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    returns = torch.empty_like(advantages)
    kernels(rewards.device).gae(
        rewards=rewards, values=values, mask=mask, cu_seqlens=cu_seqlens, last_values=last_values,
        gamma=gamma, lam=lam if lams is None else lams, zero_holes=zero_holes,
        advantages=advantages, returns=returns,
    )  # fmt: skip
    return advantages, returns
