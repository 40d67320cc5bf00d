"""``value_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: two launches."""

import torch
from torch import Tensor

from rlkernel.calls.value_loss import ValueLossCall, ValueLossResults
from rlkernel.native import kernels, taking

unsupported = taking("values")


def forward(call: ValueLossCall) -> ValueLossResults:
    values, cu_seqlens, items = call.values, call.cu_seqlens, call.num_items
    device, part = values.device, kernels(values.device)
    if cu_seqlens is None:
        rows, length = values.shape
        slots = rows * -(-length // part.CHUNK)
    else:
        rows = cu_seqlens.shape[0] - 1
        slots = values.shape[0] // part.CHUNK + rows + 1
    slope = torch.empty(*values.shape, dtype=torch.float32, device=device) if call.slopes else None
    partials = torch.empty(slots * part.VALUE_SUMS, dtype=torch.float64, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    loss = scale.new_empty(())
    metrics = scale.new_empty(part.VALUE_METRICS)
    part.value_loss_forward(
        values=values, returns=call.returns, old_values=call.old_values, mask=call.mask,
        cu_seqlens=cu_seqlens, cliprange=call.cliprange, huber_delta=call.huber_delta or 0.0,
        unit=call.unit, items=0.0 if items is None else items, factor=call.factor, slope=slope,
        partials=partials, scale=scale, loss=loss, metrics=metrics,
    )  # fmt: skip
    return ValueLossResults(loss, metrics, slope, scale)


def backward(call: ValueLossCall, results: ValueLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    slope = results.slope
    assert slope is not None
    out = torch.empty(slope.shape, dtype=call.dtype, device=slope.device)
    kernels(slope.device).value_loss_backward(
        grad_loss=grad_loss, slope=slope, scale=results.scale, cu_seqlens=call.cu_seqlens, out=out
    )
    return (out,)
