"""``gae`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, launch


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = [
        f"rewards and values must be at most fp32, got {str(x.dtype).removeprefix('torch.')}"
        for x in tensors[:2]
        if x.dtype == torch.float64
    ][:1]
    kernels = kernels_for(tensors[0].device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


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
    rows, length = rewards.shape if cu_seqlens is None else (len(cu_seqlens) - 1, 0)
    launch(
        "gae", rewards.device, rewards.data_ptr(), rewards.stride(0), values.data_ptr(), values.stride(0),
        _address(mask), 0 if mask is None else mask.stride(0), _address(cu_seqlens), rows, length,
        rewards.numel(), _address(last_values), gamma, lam, _address(lams), zero_holes,
        advantages.data_ptr(), returns.data_ptr(),
    )  # fmt: skip
    return advantages, returns


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
