"""Calls of ``prefix_shared_attention``: a prompt whose keys take several programs, and its completions."""

import os
from unittest import mock

import torch

from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule, OutGrads
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.runtime import trials
from rlkernel.triton_ops import prefix_shared_attention
from rlkernel.triton_ops import prefix_shared_attention_around as around
from rlkernel.triton_ops.prefix_shared_attention_plan import CHUNK


def cases():
    def run(head_dim, dtype, softcap, sinks, bitwise, v_dim=0):
        layout = PrefixLayout((65, CHUNK, 65), (-1, 0, 0), (False, True, True))
        rule = AttentionRule(head_dim**-0.5, softcap, 0, bitwise)
        q, k = (torch.empty(layout.total, h, head_dim, dtype=dtype) for h in (8, 2))
        v = torch.empty(layout.total, 2, v_dim or head_dim, dtype=dtype)
        call = AttentionCall(q, k, v, layout, rule, torch.ones(8) if sinks else None)
        results = prefix_shared_attention.forward(call)
        if not bitwise:
            prefix_shared_attention.backward(call, results, OutGrads(torch.empty_like(results.out)))

    def run_stored(*arguments):
        with mock.patch.dict(os.environ, {trials.STORE_SCORES: "1"}):
            run(*arguments)

    def run_around(head_dim, dtype):
        """Rows that start at the third, whose lse starts anywhere."""
        out, k = (torch.empty(64, h, head_dim, dtype=dtype) for h in (8, 2))
        lse, index, offsets = torch.empty(8, 64), torch.zeros(64, dtype=torch.int64), torch.arange(65)
        around.attention_merge(out[3:], lse[:, 3:], out[:-3], lse[:, :-3], torch.ones(8))
        around.segment_reduce(*around.gather_kv(k, k, index), index, offsets)

    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "bf16 D = 64": lambda: run(64, bf16, 0.0, True, False),
        "bf16 D = 128": lambda: run(128, bf16, 0.0, False, False),
        "bf16 D = 128 stored": lambda: run_stored(128, bf16, 0.0, False, False),
        "bf16 D = 128 softcap stored": lambda: run_stored(128, bf16, 50.0, False, False),
        "bf16 D = 128 bitwise": lambda: run(128, bf16, 0.0, False, True),
        "bf16 D = 256 softcap": lambda: run(256, bf16, 50.0, False, False),
        "bf16 D = 192, Dv = 128": lambda: run(192, bf16, 0.0, False, False, 128),
        "bf16 D = 192, Dv = 128 bitwise": lambda: run(192, bf16, 0.0, False, True, 128),
        "fp32 D = 128": lambda: run(128, fp32, 0.0, False, False),
        "around vendors, bf16 D = 128": lambda: run_around(128, bf16),
        "around vendors, bf16 D = 192": lambda: run_around(192, bf16),
        "around vendors, fp32 D = 64": lambda: run_around(64, fp32),
    }
