"""``whiten`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: two launches."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, launch

CHUNK = 2048  # rlkernel::kChunk
MOMENTS = 3  # doubles of a rlkernel::Moments


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = ["x must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else []
    kernels = kernels_for(tensors[0].device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


def forward(
    x: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    shift_mean: bool,
    unbiased: bool,
    eps: float,
    eps_in: str,
) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    run(x, mask, weights, shift_mean, unbiased, eps, eps_in, out)
    return out


def run(
    x: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    shift_mean: bool,
    unbiased: bool,
    eps: float,
    eps_in: str,
    out: Tensor | None,
    states: Tensor | None = None,
    state: Tensor | None = None,
    update: bool = True,
    clip: float = math.inf,
) -> None:
    """``out`` is ``x`` scaled by the moments of ``states`` [R, 3] and, with ``update``, of ``x`` itself; the
    merged moments go to ``state`` [3]; all are dense."""
    partials = torch.empty(
        -(-x.numel() // CHUNK) * MOMENTS if update else 0, dtype=torch.float64, device=x.device
    )
    weights = None if weights is None else weights.float()
    launch(
        "whiten", x.device, x.data_ptr(), x.dtype == torch.float64, _address(mask), _address(weights),
        x.numel(), _address(states), 0 if states is None else len(states), update, state is not None,
        shift_mean, unbiased, eps_in == "std", eps, clip, partials.data_ptr(), _address(out), _address(state),
    )  # fmt: skip


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
