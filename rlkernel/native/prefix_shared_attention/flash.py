"""``prefix_shared_attention`` on NVIDIA GPUs: a vendor's varlen kernels, the compiled ones around them."""

from __future__ import annotations

from torch import Tensor

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.drivers import prefix_shared_attention_flash as driver
from rlkernel.native import kernels_for
from rlkernel.native.prefix_shared_attention.kernels import attention_merge, gather_kv, segment_reduce

AROUND = driver.Around(attention_merge, gather_kv, segment_reduce)


def unsupported_flash(q: Tensor, v: Tensor, rule: AttentionRule | None, needs_grad: bool) -> list[str]:
    if wrong := driver.device_reasons(q):
        return wrong
    reasons = driver.reasons(q, v, rule, needs_grad)
    kernels = kernels_for(q.device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


def forward(call: AttentionCall) -> AttentionResults:
    return driver.forward(call, AROUND)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    return driver.backward(call, results, grads, AROUND)
