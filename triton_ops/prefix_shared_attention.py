"""``prefix_shared_attention`` over Triton: one pass forward, no merge, no copies of shared keys.

On a GPU that has a vendor's flash kernels and not the compiled ones around them, it takes the vendor's, with
Triton's around them: ``prefix_shared_attention_flash``.  The rest of this file is about its own.

Backward: ``prefix_shared_attention_backward``.
"""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    OutGrads,
)
from rlkernel.triton_ops import prefix_shared_attention_blocks as launch
from rlkernel.triton_ops import prefix_shared_attention_flash as flash
from rlkernel.triton_ops._device import dense_reasons, tensor_reasons
from rlkernel.triton_ops.prefix_shared_attention_backward import one_pass_backward
from rlkernel.triton_ops.prefix_shared_attention_kernels import attention_forward_kernel

MAX_HEAD_DIM = 256


def unsupported(q: Tensor, *tensors: Tensor, **options: object) -> list[str]:
    reasons = tensor_reasons("q", q)
    for name, x in zip("qkv", (q, *tensors), strict=False):
        if name != "k" and x.shape[-1] > MAX_HEAD_DIM:
            reasons.append(f"the head dim of {name} must be at most {MAX_HEAD_DIM}, got {x.shape[-1]}")
        reasons += dense_reasons(name, x)
    return reasons


def path(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    return flash.path(q, k, v, options.get("rule"))


def forward(call: AttentionCall) -> AttentionResults:
    return one_pass(call) if _is_own(call) else flash.forward(call)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    return one_pass_backward(call, results, grads) if _is_own(call) else flash.backward(call, results, grads)


def _is_own(call: AttentionCall) -> bool:
    return bool(flash.refusals(call.q, call.k, call.v, call.rule))


def one_pass(call: AttentionCall) -> AttentionResults:
    q, k, v, layout, rule, sinks, _ = call
    total, heads, _ = q.shape
    out = torch.empty(total, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    dims = q.shape[2], v.shape[2]
    blocks = launch.blocks_of("forward", dims, q.dtype, rule)
    plan = launch.query_plan_of(layout, rule, blocks, q.device)
    keys = layout.gathered(q.device).keys if rule.bitwise else None
    if total:
        with torch.cuda.device_of(q):
            attention_forward_kernel[(len(plan.tiles) * heads,)](
                *launch.strided(q), *launch.strided(k), *launch.strided(v),
                None if sinks is None else sinks.contiguous(), out, lse, plan.tiles, plan.runs, keys,
                *layout.row_tables(q.device), total, *launch.numbers(rule),
                HEADS=heads, GROUP=heads // k.shape[1], **launch.shape_of(dims, blocks, blocks.k),
            )  # fmt: skip
    return AttentionResults(out, lse)
