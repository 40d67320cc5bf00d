"""``swiglu`` over Triton: one launch each way."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.swiglu import SwigluCall, SwigluGrads, SwigluResults, halves
from rlkernel.triton_ops import swiglu_kernels as kernels
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.rms_norm import rows_of

unsupported = taking("gate")


def forward(call: SwigluCall) -> SwigluResults:
    gate, up = halves(call.gate) if call.packed else (call.gate, call.up)
    product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if product.numel():
        with torch.cuda.device_of(gate):
            kernels.swiglu_forward_kernel[grid_of(gate)](
                *rows_of(gate), *rows_of(up), product, gate.shape[-1], **plan_of(call, gate)
            )
    return SwigluResults(product)


def backward(call: SwigluCall, grad_product: Tensor) -> SwigluGrads:
    gate, up = call.gate, call.up
    whole = grad_gate = grad_up = None
    if call.packed:
        whole = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        (gate, up), (grad_gate, grad_up) = halves(gate), halves(whole)
    else:
        grad_gate, grad_up = (
            torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if need else None
            for need in call.needs
        )
    step = gate.shape[-1] * (2 if call.packed else 1)
    if gate.numel():
        with torch.cuda.device_of(gate):
            kernels.swiglu_backward_kernel[grid_of(gate)](
                *rows_of(gate), *rows_of(up), *rows_of(grad_product), grad_gate, grad_up, step,
                gate.shape[-1], **plan_of(call, gate),
            )  # fmt: skip
    return SwigluGrads(grad_gate, grad_up) if whole is None else SwigluGrads(whole, None)


def block_of(gate: Tensor) -> int:
    return min(next_power_of_2(gate.shape[-1]), 1024)


def grid_of(gate: Tensor) -> tuple[int]:
    length = gate.shape[-1]
    return (gate.numel() // length * cdiv(length, block_of(gate)),)


def plan_of(call: SwigluCall, gate: Tensor) -> dict[str, Any]:
    return {
        "ACTIVATION": getattr(kernels.Activation, call.activation),
        "ROUND_FIRST": call.rounding == "before_product",
        "BLOCK": block_of(gate),
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
