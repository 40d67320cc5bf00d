"""``whiten`` over Triton: two launches."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.whiten import WhitenCall, WhitenResults
from rlkernel.triton_ops._device import at_most_fp32
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops.whiten_kernels import CHUNK, MERGED, Moment, moments_kernel, scale_kernel

_PLAN: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


unsupported = at_most_fp32("x")


def forward(call: WhitenCall) -> WhitenResults:
    return WhitenResults(scaled(call))


def scaled(
    call: WhitenCall,
    states: Tensor | None = None,
    state: Tensor | None = None,
    update: bool = True,
    clip: float = math.inf,
) -> Tensor:
    """``x`` scaled by the moments of ``states`` [R, 3] and, with ``update``, of ``x`` itself; the merged
    moments go to ``state`` [3]; all are dense."""
    x, mask, weights, shift_mean, unbiased, eps, eps_in = call
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    n = x.numel()
    chunks = cdiv(n, CHUNK)
    partials = torch.empty(chunks if update else 0, len(Moment), dtype=torch.float64, device=x.device)
    mask = None if mask is None else mask.view(torch.uint8)
    weights = None if weights is None else weights.float()
    with torch.cuda.device_of(x):
        if update and chunks:
            moments_kernel[(chunks,)](x, mask, weights, n, partials, CHUNK=CHUNK, **_PLAN)
        if chunks or state is not None:
            scale_kernel[(max(chunks, 1),)](
                x, mask, n, states, 0 if states is None else len(states), partials, out, state, eps, clip,
                UPDATE=update, IDENTITY=state is not None, SHIFT_MEAN=shift_mean, UNBIASED=unbiased,
                EPS_IN_STD=eps_in == "std", CHUNK=CHUNK, MERGED=MERGED, **_PLAN,
            )  # fmt: skip
    return out
