"""``value_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: two launches."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import launch
from rlkernel.native.logprob import DTYPES, unsupported_tensor
from rlkernel.types import VALUE_METRICS, Aggregation

Result = tuple[Tensor, Tensor, Tensor | None, Tensor]

CHUNK = 2048  # rlkernel::kChunk
SUMS = 8  # doubles of a rlkernel::ValueSums
UNITS = {"token": 0, "sum": 1, "mean": 2}  # rlkernel::Unit


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return unsupported_tensor("values", tensors[0])


def forward(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    old_values: Tensor | None,
    cliprange: float,
    huber_delta: float | None,
    aggregation: Aggregation,
    cu_seqlens: Tensor | None,
    need_slope: bool,
) -> Result:
    device, rows, length = values.device, *_sizes(values, cu_seqlens)
    slots = rows * -(-length // CHUNK) if cu_seqlens is None else length // CHUNK + rows + 1
    slope = torch.empty(*values.shape, dtype=torch.float32, device=device) if need_slope else None
    partials = torch.empty(slots * SUMS, dtype=torch.float64, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    loss = scale.new_empty(())
    metrics = scale.new_empty(len(VALUE_METRICS))
    unit, items, factor = aggregation
    number = items if isinstance(items, float) else 0.0
    launch(
        "value_loss_forward", device, values.data_ptr(), returns.data_ptr(), _address(old_values),
        DTYPES[values.dtype], DTYPES[returns.dtype], mask.data_ptr(), _stride(values), _stride(returns),
        0 if old_values is None else _stride(old_values), _stride(mask), rows, length, *_offsets(cu_seqlens),
        cliprange, huber_delta or 0.0, UNITS[unit], _address(items), number, factor, _address(slope),
        partials.data_ptr(), scale.data_ptr(), loss.data_ptr(), metrics.data_ptr(),
    )  # fmt: skip
    return loss, metrics, slope, scale


def backward(
    grad_loss: Tensor, slope: Tensor, scale: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(slope.shape, dtype=dtype, device=slope.device)
    launch(
        "value_loss_backward", slope.device, grad_loss.data_ptr(), slope.data_ptr(), scale.data_ptr(),
        *_sizes(slope, cu_seqlens), *_offsets(cu_seqlens), out.data_ptr(), DTYPES[dtype],
    )  # fmt: skip
    return out


def _sizes(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Sequences, and tokens of each padded one or of all packed ones."""
    return (x.shape[0], x.shape[1]) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, x.shape[0])


def _offsets(cu_seqlens: Tensor | None) -> tuple[int, int]:
    return (0, 0) if cu_seqlens is None else (cu_seqlens.data_ptr(), cu_seqlens.itemsize)


def _stride(x: Tensor) -> int:
    return x.stride(0) if x.dim() == 2 else 0


def _address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, Tensor) else 0
