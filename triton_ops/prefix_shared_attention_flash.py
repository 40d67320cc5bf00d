"""``prefix_shared_attention`` over a vendor's varlen kernels, Triton's in the place of the compiled ones.

For machines without the compiled extension: where it could run a call over these kernels, one that is asked
of Triton by name is for Triton's own.  Those run, too, where auto mode takes Triton first.
"""

from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.drivers import prefix_shared_attention_flash as driver
from rlkernel.triton_ops.prefix_shared_attention_around import attention_merge, gather_kv, segment_reduce

AROUND = driver.Around(attention_merge, gather_kv, segment_reduce)


def refusals(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None) -> list[str]:
    """Why the vendors' kernels are not taken; empty where they are.

    Also without gradients only what has a backward, so that a pass with them takes no other.
    """
    if reasons := driver.reasons(q, v, rule, needs_grad=True):
        return reasons
    if dispatch.order("prefix_shared_attention", q.device)[0] == "triton":
        return ["on this GPU Triton's own are the faster ones"]
    if dispatch.able("prefix_shared_attention", ("native",), q, k, v, rule=rule):
        return ["the vendors' kernels are native's, which can run this"]
    return []


def path(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None) -> str:
    if reasons := refusals(q, k, v, rule):
        return f"Triton's own kernels: {'; '.join(reasons)}"
    return f"{driver.path(q, v, rule)}, with Triton's kernels around it"


def forward(call: AttentionCall) -> AttentionResults:
    return driver.forward(call, AROUND)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    return driver.backward(call, results, grads, AROUND)
