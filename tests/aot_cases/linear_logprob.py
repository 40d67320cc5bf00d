"""Calls of the fused ``linear_logprob``, as in ``logprob``, where the kernels of tiles have theirs."""

from unittest import mock

import torch

from rlkernel.calls.linear_logprob import Head, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import LogprobResults, RowGrads
from rlkernel.triton_ops import linear_logprob
from rlkernel.triton_ops import linear_logprob_fused as fused

VOCAB = 600


def cases():
    def made(
        dtype, size, entropy=False, head=False, softcap=None, per_row=False, statistics=(), needs=(True,) * 3
    ):
        hidden, weight = torch.empty(300, size, dtype=dtype), torch.empty(VOCAB, size, dtype=dtype)
        t = torch.ones(300) if per_row else 0.7
        bias, scale, softcap = (torch.ones(VOCAB), 0.5, 30.0) if head else (None, 1.0, softcap)
        options = Head(bias, t, scale, softcap, -100, torch.float32, dtype)
        ids = torch.zeros(300, dtype=torch.int64)
        return LinearLogprobCall.of(
            hidden, weight, ids, options, return_entropy=entropy, algorithm="fused", statistics=statistics,
            needs=needs,
        )  # fmt: skip

    def forward(*arguments, **options):
        return lambda: linear_logprob.forward(made(*arguments, **options))

    def backward(*arguments, cut=(300, VOCAB), **options):
        def run():
            call = made(*arguments, **options)
            results = LinearLogprobResults.of(LogprobResults.empty(call.target_ids, True))
            g = torch.ones(300)
            grads = RowGrads(g, g if call.return_entropy else None, g)
            with mock.patch.object(fused, "_cut", lambda *_: fused._Cut(*cut)):
                linear_logprob.backward(call, results, grads)

        return run

    fp16, bf16 = torch.float16, torch.bfloat16
    of_hidden, of_weight = {"needs": (True, False, False)}, {"needs": (False, True, False)}
    statistics = ("mean_logits", "is_top1", "log_sum_sq_probs")
    return {
        "fused bf16": forward(bf16, 4096),
        "fused bf16 entropy": forward(bf16, 4096, entropy=True),
        "fused bf16 entropy softcap": forward(bf16, 4096, entropy=True, softcap=30.0),
        "fused bf16 entropy head": forward(bf16, 4096, entropy=True, head=True, per_row=True),
        "fused bf16 statistics": forward(bf16, 4096, entropy=True, statistics=statistics),
        "fused fp16 entropy odd H": forward(fp16, 4097, entropy=True),
        "fused gradient bf16": backward(bf16, 4096, **of_hidden),
        "fused gradient bf16 of weight": backward(bf16, 4096, **of_weight),
        "fused gradient bf16 entropy, in slices": backward(
            bf16, 4096, entropy=True, cut=(300, 256), **of_hidden
        ),
        "fused gradient bf16 of weight, in chunks": backward(bf16, 4096, cut=(128, VOCAB), **of_weight),
        "fused gradient bf16 softcap": backward(bf16, 4096, softcap=30.0, **of_hidden),
        "fused gradient bf16 entropy head": backward(bf16, 4096, entropy=True, head=True, per_row=True),
        "fused gradient fp16 entropy odd H": backward(fp16, 4097, entropy=True),
    }
