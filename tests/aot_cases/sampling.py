"""Calls of ``sampling`` on small CPU tensors, whose kernels are compiled for every GPU and not launched."""

import torch
import triton

from rlkernel.calls.sampling import Sampling, SamplingCall
from rlkernel.triton_ops import sampling


def cases():
    rows, ids = torch.ones(2), torch.ones(2, dtype=torch.int64)

    def run(vocab, dtype, adjusted=False, masked=False, **options):
        drawn = {} if "token_ids" in options else {"seeds": ids, "positions": ids}
        if masked:
            options["token_bitmask"] = torch.zeros(2, triton.cdiv(vocab, 32), dtype=torch.int32)
        z = torch.empty(2, vocab) if adjusted else None
        request = Sampling(**{"raw": True, **drawn, **options})
        sampling.forward(SamplingCall(torch.empty(2, vocab, dtype=dtype), z, request))

    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    everything = {
        "temperature": rows, "top_k": ids, "top_p": rows, "min_p": rows,
        "top_n_sigma": rows, "thresholds": torch.ones(2, 3), "skip": rows > 0, "entropy": True,
        "rank": True, "support": 512, "softmax": True,
    }  # fmt: skip
    return {
        "bf16": lambda: run(151936, bf16),
        "fp16 odd V": lambda: run(50257, fp16, temperature=rows, entropy=True),
        "fp32 gumbel": lambda: run(151936, fp32, gumbel=True),
        "bf16 forced rank": lambda: run(151936, bf16, token_ids=ids, rank=True, entropy=True),
        "bf16 top-k top-p": lambda: run(151936, bf16, top_k=50, top_p=0.9, support=512),
        "bf16 band": lambda: run(151936, bf16, top_p=0.9, support=512, band=torch.ones(2, 2)),
        "bf16 band odd V": lambda: run(50257, bf16, True, True, **everything, band=torch.ones(2, 2)),
        "fp32 band gumbel": lambda: run(151936, fp32, band=torch.ones(2, 2), gumbel=True),
        "bf16 everything": lambda: run(151936, bf16, True, True, **everything),
        "bf16 ranks of ties": lambda: run(
            151936, bf16, temperature=rows, top_p=0.9, rank=True, rank_ties="kept", greedy_softmax=True
        ),
        "bf16 everything odd V": lambda: run(50257, bf16, True, True, **everything),
        "fp32 everything gumbel joint": lambda: run(
            151936, fp32, masked=True, **everything, gumbel=True, order="joint"
        ),
    }
