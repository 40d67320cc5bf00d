"""``value_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: two launches."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels
from rlkernel.native.logprob import unsupported_tensor
from rlkernel.types import Aggregation

Result = tuple[Tensor, Tensor, Tensor | None, Tensor]


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
    device, part = values.device, kernels(values.device)
    if cu_seqlens is None:
        rows, length = values.shape
        slots = rows * -(-length // part.CHUNK)
    else:
        rows = cu_seqlens.shape[0] - 1
        slots = values.shape[0] // part.CHUNK + rows + 1
    slope = torch.empty(*values.shape, dtype=torch.float32, device=device) if need_slope else None
    partials = torch.empty(slots * part.VALUE_SUMS, dtype=torch.float64, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    loss = scale.new_empty(())
    metrics = scale.new_empty(part.VALUE_METRICS)
    unit, items, factor = aggregation
    part.value_loss_forward(
        values=values, returns=returns, old_values=old_values, mask=mask, cu_seqlens=cu_seqlens,
        cliprange=cliprange, huber_delta=huber_delta or 0.0, unit=unit, items=0.0 if items is None else items,
        factor=factor, slope=slope, partials=partials, scale=scale, loss=loss, metrics=metrics,
    )  # fmt: skip
    return loss, metrics, slope, scale


def backward(
    grad_loss: Tensor, slope: Tensor, scale: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(slope.shape, dtype=dtype, device=slope.device)
    kernels(slope.device).value_loss_backward(
        grad_loss=grad_loss, slope=slope, scale=scale, cu_seqlens=cu_seqlens, out=out
    )
    return out
