"""Calls of ``swiglu``, forward and backward: of each activation, packed and of two tensors."""

import torch

from rlkernel.calls.swiglu import SwigluCall
from rlkernel.triton_ops import swiglu


def cases():
    def run(length, dtype, activation, rounding, packed):
        gate = torch.ones(2, 3, length * (1 + packed), dtype=dtype)
        call = SwigluCall(gate, None if packed else gate, activation, rounding, packed, (True, True))
        swiglu.forward(call)
        swiglu.backward(call, torch.ones(2, 3, length, dtype=dtype))

    return {
        "fp32 silu": lambda: run(1000, torch.float32, "silu", "before_product", False),
        "bf16 silu packed": lambda: run(4096, torch.bfloat16, "silu", "before_product", True),
        "fp16 gelu": lambda: run(4096, torch.float16, "gelu", "after_product", False),
        "bf16 gelu_tanh": lambda: run(4096, torch.bfloat16, "gelu_tanh", "before_product", False),
    }
