"""``value_loss`` over Triton: two launches forward, one backward."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.value_loss import VALUE_METRICS, ValueLossCall, ValueLossResults
from rlkernel.triton_ops import value_loss_kernels as kernels
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops._sizes import cdiv

_PLAN: dict[str, Any] = {"CHUNK": kernels.CHUNK, "num_warps": 8, "enable_fp_fusion": False}


unsupported = taking("values")


def forward(call: ValueLossCall) -> ValueLossResults:
    values, returns, old_values, mask = call.values, call.returns, call.old_values, call.mask
    cu_seqlens, items = call.cu_seqlens, call.num_items
    rows, length, steps, slots = layout_of(values, cu_seqlens)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=values.device)

    slope = empty(*values.shape) if call.slopes else None
    partials, scale = empty(slots * len(kernels.Sum), dtype=torch.float64), empty(rows)
    loss, metrics = empty(), empty(len(VALUE_METRICS))
    tensor, number = (items, 0.0) if isinstance(items, Tensor) else (None, items or 0.0)
    with torch.cuda.device_of(values):
        if slots:
            kernels.chunk_kernel[(slots,)](
                values, stride_of(values), returns, stride_of(returns), old_values, stride_of(old_values),
                mask.view(torch.uint8), stride_of(mask),
                rows, length, cu_seqlens, steps, call.cliprange, call.huber_delta, slope, partials, **_PLAN,
            )  # fmt: skip
        kernels.total_kernel[(1,)](
            partials, rows, length, cu_seqlens, tensor, number, call.factor, scale, loss, metrics,
            UNIT=call.unit, ROWS=kernels.ROWS, CHUNK=kernels.CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return ValueLossResults(loss, metrics, slope, scale)


def backward(call: ValueLossCall, results: ValueLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    slope, cu_seqlens = results.slope, call.cu_seqlens
    assert slope is not None
    rows, length, steps, slots = layout_of(slope, cu_seqlens)
    out = torch.empty(slope.shape, dtype=call.dtype, device=slope.device)
    if slots:
        with torch.cuda.device_of(slope):
            kernels.multiply_kernel[(slots,)](
                grad_loss, slope, results.scale, rows, length, cu_seqlens, steps, out, **_PLAN
            )
    return (out,)


def layout_of(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    """``(rows, length, steps, slots)``: sequences, tokens of each padded one or of all packed ones, steps of
    the search among the sequences, and more than any slot."""
    if cu_seqlens is None:
        rows, length = x.shape
        return rows, length, 0, rows * cdiv(length, kernels.CHUNK)
    rows, length = cu_seqlens.shape[0] - 1, x.shape[0]
    return rows, length, rows.bit_length(), length // kernels.CHUNK + rows + 1


def stride_of(x: Tensor | None) -> int:
    """Of its rows; 0 of packed tokens, and where there is no tensor."""
    return x.stride(0) if x is not None and x.dim() == 2 else 0
