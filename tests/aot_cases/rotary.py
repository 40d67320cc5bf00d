"""Calls of ``rotary``, forward and backward, of transformers' layout and of vLLM's."""

import torch

from rlkernel.calls.rotary import RotaryCall, RotaryGrads
from rlkernel.triton_ops import rotary


def cases():
    def run(dtype, dim, rotary_dim, interleaved, rounding, cached):
        q = (
            torch.ones(6, 8, dim, dtype=dtype)
            if cached
            else torch.ones(2, 3, 8, dim, dtype=dtype).transpose(1, 2)
        )
        shape = (9, rotary_dim // 2) if cached else (2, 3, rotary_dim)
        positions = torch.zeros(6, dtype=torch.int64) if cached else None
        tables = torch.ones(2, *shape, dtype=dtype)
        call = RotaryCall(q, q, *tables, positions, 1, rotary_dim, interleaved, rounding, needs=(True, True))
        rotary.forward(call)
        rotary.backward(call, RotaryGrads(q, None))

    return {
        "bf16": lambda: run(torch.bfloat16, 128, 128, False, "before_sum", False),
        "bf16 cached part": lambda: run(torch.bfloat16, 128, 64, False, "before_sum", True),
        "fp16 cached interleaved": lambda: run(torch.float16, 64, 64, True, "after_sum", True),
        "fp32": lambda: run(torch.float32, 64, 64, False, "before_sum", False),
    }
