"""``whiten`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: two launches."""

import math

import torch
from torch import Tensor

from rlkernel.calls.whiten import WhitenCall, WhitenResults
from rlkernel.native import at_most_fp32, kernels

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
    part = kernels(x.device)
    count = -(-x.numel() // part.CHUNK) * part.MOMENTS if update else 0
    partials = torch.empty(count, dtype=torch.float64, device=x.device)
    part.whiten(
        x=x, mask=mask, weights=None if weights is None else weights.float(), states=states, update=update,
        shift_mean=shift_mean, unbiased=unbiased, eps_in_std=eps_in == "std", eps=eps, clip=clip,
        partials=partials, out=out, state=state,
    )  # fmt: skip
    return out
