"""``prefix_shared_attention`` by the tensors' device: torch's CPU kernels, or vendors' flash kernels."""

from typing import Any

from torch import Tensor

from rlkernel.native import kernels_for
from rlkernel.native.prefix_shared_attention import cpu
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.types import AttentionRule


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    q, k, v = tensors
    found = kernels_for(q.device)
    if isinstance(found, str):
        return [found]
    if q.device.type == "cpu":
        return []
    from rlkernel.native.prefix_shared_attention import flash

    names = ("layout", "rule", "sinks", "needs_grad")
    return flash.unsupported_flash(q, k, v, *(options.get(name) for name in names))


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, rule: AttentionRule, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``out`` [T, Hq, Dv] and ``lse`` [Hq, T], fp32 or fp64."""
    return _path(q).forward(q, k, v, layout, rule, sinks)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PrefixLayout,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    return _path(q).backward(grad_out, q, k, v, out, lse, layout, rule)


def _path(q: Tensor) -> Any:
    if q.device.type == "cpu":
        return cpu
    from rlkernel.native.prefix_shared_attention import flash

    return flash
