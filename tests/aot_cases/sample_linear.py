"""Calls of the fused ``sample_linear``; the kernels of the tiled one have theirs in ``sampling``."""

import torch

from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sample_linear import SampleLinearCall
from rlkernel.calls.sampling import Sampling
from rlkernel.triton_ops import sample_linear

ROWS, VOCAB = 300, 600


def cases():
    keys, t = torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS)

    def drawn(dtype, size, gumbel=False, head=False):
        hidden, weight = torch.empty(ROWS, size, dtype=dtype), torch.empty(VOCAB, size, dtype=dtype)
        bias, scale, softcap = (torch.ones(VOCAB), 0.5, 30.0) if head else (None, 1.0, None)
        options = Head(bias, 1.0, scale, softcap, -100, torch.float32, dtype)
        request = Sampling(t, seeds=keys, positions=keys, raw=True, entropy=True, gumbel=gumbel)
        call = SampleLinearCall(hidden, weight, options, request, True, False, "fused")
        return lambda: sample_linear.forward(call)

    fp16, bf16 = torch.float16, torch.bfloat16
    return {
        "fused bf16": drawn(bf16, 4096),
        "fused bf16 head": drawn(bf16, 4096, head=True),
        "fused bf16 gumbel": drawn(bf16, 4096, gumbel=True),
        "fused fp16 odd H": drawn(fp16, 4097),
    }
