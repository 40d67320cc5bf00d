"""Calls of ``rms_norm``, forward and backward, alone and with a residual, of rows and of heads."""

import torch

from rlkernel.calls.rms_norm import RmsNormCall, RmsNormGrads
from rlkernel.triton_ops import rms_norm


def cases():
    def run(length, dtype, residual, rounding):
        x = torch.ones(2, 3, 4, length, dtype=dtype)[:, :, :2]
        weight = torch.ones(length, dtype=dtype)
        more = x if residual else None
        call = RmsNormCall(x, more, weight, 1e-6, 0.0, rounding, True, (True, residual, True))
        rms_norm.backward(call, rms_norm.forward(call), RmsNormGrads(x, more))

    return {
        "fp32": lambda: run(1000, torch.float32, False, "after_weight"),
        "bf16 heads": lambda: run(128, torch.bfloat16, False, "before_weight"),
        "bf16 residual": lambda: run(4096, torch.bfloat16, True, "before_weight"),
        "fp16 residual long": lambda: run(8193, torch.float16, True, "before_weight"),
    }
