"""Calls of ``value_loss``, forward and backward, with either loss and every unit."""

import torch

from rlkernel.calls.value_loss import ValueLossCall
from rlkernel.triton_ops import value_loss


def cases():
    def run(dtype, clip, delta, unit, packed):
        x = torch.ones(8 if packed else (2, 4), dtype=dtype)
        starts = torch.tensor([0, 3, 8], dtype=torch.int32) if packed else None
        items = torch.ones(()) if packed else None
        old = x.float() if clip else None
        call = ValueLossCall(x, x.float(), x > 0, old, starts, items, 0.2, delta, unit, 1.0, dtype)
        value_loss.backward(call, value_loss.forward(call), torch.ones(()))

    return {
        "fp32 clipped": lambda: run(torch.float32, True, None, "token", False),
        "bf16 clipped packed": lambda: run(torch.bfloat16, True, None, "mean", True),
        "fp16 huber": lambda: run(torch.float16, False, 1.0, "sum", False),
        "fp32 clipped huber packed": lambda: run(torch.float32, True, 1.0, "mean", True),
    }
