"""Calls of ``attention``: a sequence, whose rows are blocks of one key."""

import torch

from rlkernel.calls.attention import AttentionCall, AttentionRule
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.triton_ops import attention


def cases():
    def run(head_dim, dtype):
        q, k, v = (torch.empty(70, heads, head_dim, dtype=dtype) for heads in (8, 2, 2))
        layout = PrefixLayout((70,), (-1,), (True,))
        attention.forward(AttentionCall(q, k, v, layout, AttentionRule(head_dim**-0.5, 0.0, 0, False)))

    return {"bf16 D = 128": lambda: run(128, torch.bfloat16), "fp32 D = 64": lambda: run(64, torch.float32)}
