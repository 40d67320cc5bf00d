"""``prefix_shared_attention`` by the tensors' device: torch's CPU kernels, or vendors' flash kernels."""

from typing import Any

from torch import Tensor

from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionGrads, AttentionResults, OutGrads
from rlkernel.native import kernels_for
from rlkernel.native.prefix_shared_attention import cpu


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    q, _, v = tensors
    found = kernels_for(q.device)
    if isinstance(found, str):
        return [found]
    if q.device.type == "cpu":
        return []
    from rlkernel.native.prefix_shared_attention import flash

    # also without gradients only what has a backward: else the pass with them would run on another backend
    return flash.unsupported_flash(q, v, options.get("rule"), needs_grad=True)


def path(*tensors: Tensor, **options: Any) -> str:
    q, _, v = tensors
    rule = options.get("rule")
    if q.device.type == "cpu" and ((rule and rule.softcap) or q.shape[2] != v.shape[2]):
        return "products over tiles of rows (torch's flash kernels: no softcap, and one head dim)"
    if q.device.type == "cpu":
        return "torch's flash kernels"
    from rlkernel.drivers.prefix_shared_attention_flash import path

    return path(q, v, rule)


def forward(call: AttentionCall) -> AttentionResults:
    return _path(call.q).forward(call)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    return _path(call.q).backward(call, results, grads)


def _path(q: Tensor) -> Any:
    if q.device.type == "cpu":
        return cpu
    from rlkernel.native.prefix_shared_attention import flash

    return flash
