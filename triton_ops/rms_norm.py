"""``rms_norm`` over Triton: one launch forward; one backward, and two for the gradient of the weight."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.rms_norm import RmsNormCall, RmsNormGrads, RmsNormResults
from rlkernel.triton_ops import rms_norm_kernels as kernels
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2

unsupported = taking("x")


def forward(call: RmsNormCall) -> RmsNormResults:
    x, residual = call.x, call.residual
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if call.statistics else None
    if x.numel():
        with torch.cuda.device_of(x):
            kernels.rms_forward_kernel[(x.numel() // x.shape[-1],)](
                *rows_of(x), *rows_of(residual), summed, call.weight, call.weight_offset, call.eps, normed,
                rstd, x.shape[-1], ROUND_FIRST=call.rounding == "before_weight", **plan_of(x.shape[-1]),
            )  # fmt: skip
    return RmsNormResults(normed, summed, rstd)


def backward(call: RmsNormCall, results: RmsNormResults, grads: RmsNormGrads) -> tuple[Tensor, Tensor | None]:
    h = call.x if results.summed is None else results.summed
    rstd, weight, length = results.rstd, call.weight, h.shape[-1]
    assert rstd is not None
    rows = rstd.numel()
    grad_x = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    of_h, of_grad, of_more = rows_of(h), rows_of(grads.normed), rows_of(grads.summed)
    with torch.cuda.device_of(h):
        if rows:
            kernels.rms_backward_kernel[(rows,)](
                *of_h, *of_grad, *of_more, rstd, weight, call.weight_offset, grad_x, length, **plan_of(length)
            )
        if weight is None or not call.needs[2]:
            return grad_x, None
        partials = torch.empty(-(-rows // kernels.CHUNK_ROWS), length, dtype=torch.float32, device=h.device)
        if rows:
            kernels.rms_weight_kernel[grid_of_chunks(partials)](
                *of_h, *of_grad, rstd, partials, rows, length, **CHUNK_PLAN
            )
        return grad_x, total_of(partials, rows, weight)


CHUNK_PLAN: dict[str, Any] = {
    "CHUNK_ROWS": kernels.CHUNK_ROWS,
    "COLUMNS": kernels.COLUMNS,
    "num_warps": 2,
    "enable_fp_fusion": False,
}


def plan_of(length: int) -> dict[str, Any]:
    """How a row is taken, by its length alone."""
    block = min(next_power_of_2(length), 2048)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8), "enable_fp_fusion": False}


def rows_of(x: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """``x`` and how its rows lie: row r starts at r // inner * outer + r % inner * step."""
    if x is None:
        return None, 1, 0, 0
    if x.is_contiguous():
        return x, max(x.numel() // x.shape[-1], 1), 0, x.shape[-1]
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    flat = x.reshape(-1, *x.shape[-2:]) if x.dim() > 2 else x[None]
    return flat, max(flat.shape[1], 1), flat.stride(0), flat.stride(1)


def grid_of_chunks(partials: Tensor) -> tuple[int]:
    return (partials.shape[0] * cdiv(partials.shape[1], kernels.COLUMNS),)


def total_of(partials: Tensor, rows: int, weight: Tensor) -> Tensor:
    """The sum of the chunks, in the dtype of the weight whose gradient it is."""
    length = partials.shape[1]
    out = torch.empty(length, dtype=weight.dtype, device=weight.device)
    kernels.norm_total_kernel[(cdiv(length, kernels.COLUMNS),)](
        partials, rows, length, out, CHUNKS=kernels.CHUNKS, **CHUNK_PLAN
    )
    return out
