"""``running_normalize`` over Triton: the kernels of ``whiten``."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.triton_ops import whiten
from rlkernel.triton_ops._device import device_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = device_reasons(tensors[0])
    return reasons + (["x must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else [])


def forward(
    x: Tensor,
    mask: Tensor | None,
    states: Tensor,
    update: bool,
    shift_mean: bool,
    unbiased: bool,
    eps: float,
    eps_in: str,
    clip: float,
) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    state = torch.empty(3, dtype=torch.float64, device=x.device)
    whiten.run(x, mask, None, shift_mean, unbiased, eps, eps_in, out, states, state, update, clip)
    return out, state
