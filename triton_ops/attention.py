"""``attention`` over Triton: forward as a step on a paged cache, backward as that of a packed batch."""

from typing import Any

from torch import Tensor

from rlkernel.calls.attention import AttentionCall, AttentionGrads, AttentionResults, OutGrads
from rlkernel.drivers.attention import paged_call
from rlkernel.triton_ops import paged_prefix_attention, prefix_shared_attention


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = prefix_shared_attention.unsupported(*tensors, **options)
    if not reasons:
        q, k, v = tensors
        reasons = paged_prefix_attention.unsupported(q, k[:, None], v[:, None])
    return reasons


def forward(call: AttentionCall) -> AttentionResults:
    return AttentionResults(*paged_prefix_attention.forward(paged_call(call)))


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    return prefix_shared_attention.one_pass_backward(call, results, grads)
