"""``value_loss`` over Triton: two launches forward, one backward."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rlkernel.calls.value_loss import VALUE_METRICS, ValueLossCall, ValueLossResults
from rlkernel.triton_ops._device import DTYPES, device_reasons
from rlkernel.triton_ops.value_loss_kernels import (
    CHUNK,
    ROWS,
    Sum,
    chunk_kernel,
    multiply_kernel,
    total_kernel,
)

_PLAN: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = device_reasons(tensors[0])
    if tensors[0].dtype not in DTYPES:
        reasons.append(f"values must be float32, float16 or bfloat16, got {tensors[0].dtype}")
    return reasons


def forward(call: ValueLossCall) -> ValueLossResults:
    values, returns, mask, old_values, cu_seqlens, items = call[:6]
    rows, length, steps, slots = _layout(values, cu_seqlens)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=values.device)

    slope = empty(*values.shape) if call.slopes else None
    partials, scale = empty(slots * len(Sum), dtype=torch.float64), empty(rows)
    loss, metrics = empty(), empty(len(VALUE_METRICS))
    tensor, number = (items, 0.0) if isinstance(items, Tensor) else (None, items or 0.0)
    with torch.cuda.device_of(values):
        if slots:
            chunk_kernel[(slots,)](
                values, _stride(values), returns, _stride(returns), old_values,
                0 if old_values is None else _stride(old_values), mask.view(torch.uint8), _stride(mask),
                rows, length, cu_seqlens, steps, call.cliprange, call.huber_delta, slope, partials,
                CHUNK=CHUNK, **_PLAN,
            )  # fmt: skip
        total_kernel[(1,)](
            partials, rows, length, cu_seqlens, tensor, number, call.factor, scale, loss, metrics,
            UNIT=call.unit, ROWS=ROWS, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return ValueLossResults(loss, metrics, slope, scale)


def backward(call: ValueLossCall, results: ValueLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    slope, cu_seqlens = results.slope, call.cu_seqlens
    assert slope is not None
    rows, length, steps, slots = _layout(slope, cu_seqlens)
    out = torch.empty(slope.shape, dtype=call.dtype, device=slope.device)
    if slots:
        with torch.cuda.device_of(slope):
            multiply_kernel[(slots,)](
                grad_loss, slope, results.scale, rows, length, cu_seqlens, steps, out, CHUNK=CHUNK, **_PLAN
            )
    return (out,)


def _layout(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    """``(rows, length, steps, slots)``: sequences, tokens of each padded one or of all packed ones, steps of
    the search among the sequences, and more than any slot."""
    if cu_seqlens is None:
        rows, length = x.shape
        return rows, length, 0, rows * triton.cdiv(length, CHUNK)
    rows, length = cu_seqlens.shape[0] - 1, x.shape[0]
    return rows, length, rows.bit_length(), length // CHUNK + rows + 1


def _stride(x: Tensor) -> int:
    return x.stride(0) if x.dim() == 2 else 0


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""

    def run(dtype: torch.dtype, clip: bool, delta: float | None, unit: str, packed: bool) -> None:
        x = torch.ones(8 if packed else (2, 4), dtype=dtype)
        starts = torch.tensor([0, 3, 8], dtype=torch.int32) if packed else None
        items = torch.ones(()) if packed else None
        old = x.float() if clip else None
        call = ValueLossCall(x, x.float(), x > 0, old, starts, items, 0.2, delta, unit, 1.0, dtype)
        backward(call, forward(call), torch.ones(()))

    return {
        "fp32 clipped": lambda: run(torch.float32, True, None, "token", False),
        "bf16 clipped packed": lambda: run(torch.bfloat16, True, None, "mean", True),
        "fp16 huber": lambda: run(torch.float16, False, 1.0, "sum", False),
        "fp32 clipped huber packed": lambda: run(torch.float32, True, 1.0, "mean", True),
    }
