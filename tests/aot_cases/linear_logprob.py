"""Calls of the fused ``linear_logprob``, as in ``logprob``, where the kernels of tiles have theirs."""

import torch

from rlkernel.calls.linear_logprob import Head, LinearLogprobCall
from rlkernel.triton_ops import linear_logprob


def cases():
    def run(dtype, size, entropy, head, per_row):
        hidden, weight = torch.empty(2, size, dtype=dtype), torch.empty(50, size, dtype=dtype)
        t = torch.ones(2) if per_row else 0.7
        bias, scale, softcap = (torch.ones(50), 0.5, 30.0) if head else (None, 1.0, None)
        options = Head(bias, t, scale, softcap, -100, torch.float32, dtype)
        ids = torch.zeros(2, dtype=torch.int64)
        linear_logprob._fused(LinearLogprobCall.of(hidden, weight, ids, options, return_entropy=entropy))

    fp16, bf16 = torch.float16, torch.bfloat16
    return {
        "fused bf16": lambda: run(bf16, 4096, False, False, False),
        "fused bf16 entropy": lambda: run(bf16, 4096, True, False, False),
        "fused bf16 entropy head": lambda: run(bf16, 4096, True, True, True),
        "fused fp16 entropy odd H": lambda: run(fp16, 4097, True, False, False),
    }
