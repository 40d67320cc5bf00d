"""``running_normalize`` over the compiled extension: the kernels of ``whiten``, on CPU, CUDA or HIP."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, whiten


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = ["x must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else []
    kernels = kernels_for(tensors[0].device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


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
