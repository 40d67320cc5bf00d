"""``swiglu`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch
from torch import Tensor

from rlkernel.calls.swiglu import SwigluCall, SwigluGrads, SwigluResults, halves
from rlkernel.native import kernels, short_way, taking
from rlkernel.native._rows import dense_like, rows_of

unsupported = taking("gate")


def forward(call: SwigluCall) -> SwigluResults:
    gate, up = halves(call.gate) if call.packed else (call.gate, call.up)
    product = dense_like(gate)
    kernels(gate.device).swiglu_forward(
        gate=rows_of(gate), up=rows_of(up), activation=call.activation,
        round_first=call.rounding == "before_product", product=product,
    )  # fmt: skip
    return SwigluResults(product)


def backward(call: SwigluCall, grad_product: Tensor) -> SwigluGrads:
    found: SwigluGrads | None = short_way("swiglu_backward")((call, grad_product), {})
    if found is not None:
        return found
    packed, gate, up = None, call.gate, call.up
    grad_gate: Tensor | None
    grad_up: Tensor | None
    if call.packed:
        packed = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        (gate, up), (grad_gate, grad_up) = halves(gate), halves(packed)
    else:
        grad_gate, grad_up = (dense_like(gate) if need else None for need in call.needs)
    kernels(gate.device).swiglu_backward(
        gate=rows_of(gate), up=rows_of(up), grad_product=rows_of(grad_product), activation=call.activation,
        round_first=call.rounding == "before_product", grad_gate=written(grad_gate), grad_up=written(grad_up),
    )  # fmt: skip
    return SwigluGrads(grad_gate if packed is None else packed, None if packed is not None else grad_up)


def written(x: Tensor | None) -> Tensor | None:
    """A view of rows, where ``rows_of`` might copy: halves of a dense tensor."""
    return x if x is None or x.dim() <= 3 else x.flatten(0, -2)
