"""Calls of ``paged_prefix_attention``: two requests that share a prompt, one row each."""

import torch

from rlkernel.calls.paged_prefix_attention import PagedCall, PagedRule
from rlkernel.prefix.paged import plan_of
from rlkernel.triton_ops import paged_prefix_attention


def cases():
    def run(head_dim, dtype, softcap=0.0, window=0, sinks=False, v_dim=0):
        table = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]], dtype=torch.int32)
        lens, starts = torch.tensor([70, 71], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
        plan = plan_of(table, lens.tolist(), starts.tolist(), 16, window)
        query = torch.empty(2, 8, head_dim, dtype=dtype)
        key_cache = torch.empty(6, 16, 2, head_dim, dtype=dtype)
        value_cache = torch.empty(6, 16, 2, v_dim or head_dim, dtype=dtype)
        rule = PagedRule(head_dim**-0.5, softcap, window)
        tables = table, lens, starts, plan
        paged_prefix_attention.forward(
            PagedCall(query, key_cache, value_cache, *tables, rule, torch.ones(8) if sinks else None)
        )

    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "bf16 D = 64 window sinks": lambda: run(64, bf16, window=33, sinks=True),
        "bf16 D = 128": lambda: run(128, bf16),
        "bf16 D = 128 softcap window": lambda: run(128, bf16, 50.0, 33),
        "bf16 D = 192, Dv = 128": lambda: run(192, bf16, v_dim=128),
        "bf16 D = 256 softcap": lambda: run(256, bf16, 50.0),
        "fp32 D = 64": lambda: run(64, fp32),
        "fp32 D = 128 window": lambda: run(128, fp32, window=33),
        "fp32 D = 256": lambda: run(256, fp32),
    }
