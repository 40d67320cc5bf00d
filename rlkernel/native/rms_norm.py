"""``rms_norm`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch
from torch import Tensor

from rlkernel.calls.rms_norm import RmsNormCall, RmsNormGrads, RmsNormResults
from rlkernel.native import kernels, short_way, taking
from rlkernel.native._rows import dense_like, rows_of

unsupported = taking("x")


def forward(call: RmsNormCall) -> RmsNormResults:
    x, residual = call.x, call.residual
    normed = dense_like(x)
    summed = None if residual is None else dense_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if call.statistics else None
    kernels(x.device).rms_norm_forward(
        x=rows_of(x), residual=rows_of(residual), summed=summed, weight=call.weight,
        weight_offset=call.weight_offset, eps=call.eps, round_first=call.rounding == "before_weight",
        normed=normed, rstd=rstd,
    )  # fmt: skip
    return RmsNormResults(normed, summed, rstd)


def backward(call: RmsNormCall, results: RmsNormResults, grads: RmsNormGrads) -> tuple[Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor | None] | None = short_way("rms_norm_backward")((call, results, grads), {})
    if found is not None:
        return found
    h = call.x if results.summed is None else results.summed
    part, rstd, weight = kernels(h.device), results.rstd, call.weight
    assert rstd is not None
    grad_x = dense_like(h)
    grad_weight = partials = None
    if weight is not None and call.needs[2]:
        chunks = -(-rstd.numel() // part.NORM_ROWS)
        grad_weight = dense_like(weight)
        partials = torch.empty(chunks * h.shape[-1], dtype=torch.float32, device=h.device)
    part.rms_norm_backward(
        h=rows_of(h), grad_normed=rows_of(grads.normed), grad_summed=rows_of(grads.summed), rstd=rstd,
        weight=weight, weight_offset=call.weight_offset, grad_x=grad_x, partials=partials,
        grad_weight=grad_weight,
    )  # fmt: skip
    return grad_x, grad_weight
