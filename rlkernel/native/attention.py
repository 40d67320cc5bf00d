"""``attention`` over the compiled kernels of a CPU: forward as a paged step, backward in the same tiles."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.attention import AttentionCall, AttentionGrads, AttentionResults, OutGrads
from rlkernel.calls.paged_prefix_attention import PagedRule
from rlkernel.drivers.attention import Asked, asked_of, paged_call
from rlkernel.native import kernels, paged_prefix_attention, prefix_shared_attention


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = prefix_shared_attention.unsupported(*tensors, **options)
    if not reasons:
        q, k, v = tensors
        reasons = paged_prefix_attention.unsupported(q, k[:, None], v[:, None])
    return reasons


def forward(call: AttentionCall) -> AttentionResults:
    return AttentionResults(*paged_prefix_attention.forward(paged_call(call)))


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    q, k, v, layout, rule, *_ = call
    paged_rule = PagedRule(rule.scale, rule.softcap, rule.window)
    return gradients(q, k, v, results, grads.out, asked_of(layout), paged_rule)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, results: AttentionResults, grad: Tensor, asked: Asked, rule: PagedRule
) -> AttentionGrads:
    """Of q [T, Hq, D], k and v [Tk, Hkv, D]; a row without a request gets 0."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device="cpu") for x in (q, k, v))
    q, k, v, out, grad = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v, results.out, grad))
    kernels(q.device).attention_backward(
        q=q, k=k, v=v, out=out, lse=results.lse.contiguous(), grad=grad.to(q.dtype), rows=asked.rows,
        key_offsets=asked.key_offsets, keys=asked.keys, group_offsets=asked.group_offsets, rule=rule,
        dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return AttentionGrads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
