"""``linear_logprob`` over supports: autograd in eager mode, and the custom op under torch.compile."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.drivers import linear_logprob_support as support_products
from rlkernel.drivers.logprob import unfiltered_ids
from rlkernel.ops import _validate
from rlkernel.ops import linear_logprob as whole
from rlkernel.runtime.modes import once_differentiable, without_autocast
from rlkernel.types import Head, LinearGrads, LinearStats

Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]
Support = tuple[Tensor, Tensor]  # ids, offsets


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    algorithm: str,
    need_direction: bool,
    keep: bool,
    support: Support,
) -> Any:
    """Logprobs, entropy and lse of ``rlkernel.linear_logprob`` with a support; all is checked and flat."""
    if torch.compiler.is_compiling():
        choices = return_entropy, algorithm, need_direction
        every = _op(hidden, weight, head.bias, target_ids, *whole._scalars(head), *choices, *support)
        return every[:3]
    options = head, return_entropy, algorithm, need_direction, keep, support
    return _LinearLogprob.apply(hidden, weight, head.bias, target_ids, *options)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        hidden,
        weight,
        bias,
        target_ids,
        head,
        return_entropy,
        algorithm,
        need_direction,
        keep,
        support,
    ):
        ctx.set_materialize_grads(False)
        # backward runs on the same backends, also on another thread or after the block that forced them
        ctx.impls = impls = _pick(hidden, weight, target_ids, head, algorithm)
        options = return_entropy, algorithm, need_direction, keep
        of_whole, stats, u = _forward(impls, hidden, weight, target_ids, head, *options, support)
        per_row = head.temperature if isinstance(head.temperature, Tensor) else None
        inputs = hidden, weight, bias, target_ids, per_row, *support
        ctx.save_for_backward(*inputs, *of_whole[1:], *stats, u)
        ctx.head = head._replace(bias=None, temperature=1.0 if per_row is not None else head.temperature)
        return _merged(of_whole, stats, target_ids, support, head.ignore_index)

    @staticmethod
    @once_differentiable("linear_logprob")
    def backward(ctx: Any, *grads: Any):  # type: ignore[no-untyped-def]
        if all(g is None for g in grads):
            return (None,) * 10
        hidden, weight, bias, target_ids, per_row, ids, offsets, *saved, u = ctx.saved_tensors
        head = ctx.head._replace(bias=bias)
        if per_row is not None:
            head = head._replace(temperature=per_row)
        rows = (saved[0], *saved[2:5]), saved[5:], u
        needs = ctx.needs_input_grad[:3]
        result = _backward(ctx.impls, grads, hidden, weight, target_ids, head, rows, (ids, offsets), needs)
        return *result, *(None,) * 7


def _pick(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, head: Head, algorithm: str
) -> tuple[ModuleType, ModuleType]:
    """Who multiplies, and who takes the logits at the supports, which are fp32 (fp64 for fp64 input)."""
    wide = torch.promote_types(head.compute_dtype, torch.float32)
    logits = torch.empty(0, dtype=wide, device=hidden.device)
    return whole._pick(hidden, weight, head, algorithm), dispatch.pick("logprob", logits, target_ids)


def _forward(
    impls: tuple[ModuleType, ModuleType],
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    algorithm: str,
    need_direction: bool,
    keep: bool,
    support: Support,
) -> tuple[LinearStats, Stats, Tensor]:
    """The statistics of the whole rows, those of the others, and the products at the supports."""
    _validate.values(target_ids, weight.shape[0], head.temperature, head.ignore_index)
    none = hidden.new_empty(0)
    row = target_ids, head.temperature, head.ignore_index, return_entropy, False, *support, True
    whole_ids = unfiltered_ids(LogprobCall(none, *row))
    options = return_entropy, algorithm, need_direction, keep, ()
    of_whole, _ = whole._forward(impls[0], hidden, weight, whole_ids, head, *options)
    with without_autocast(hidden.device):
        u = support_products.products(hidden, weight, head, *support)
        stats = impls[1].forward(LogprobCall(support_products.capped(u, head), *row))
    _validate.healthy("hidden", stats.lse)
    return of_whole, stats[:5], u


def _merged(
    of_whole: LinearStats, stats: Stats, target_ids: Tensor, support: Support, ignore_index: int
) -> tuple[Any, ...]:
    """Each is 0 in the rows of the other."""
    filtered = (support[1][1:] > support[1][:-1]) & (target_ids != ignore_index)
    pairs = zip(of_whole[:3], stats[:3], strict=True)
    return tuple(None if a is None or b is None else torch.where(filtered, b, a) for a, b in pairs)


def _backward(
    impls: tuple[ModuleType, ModuleType],
    grads: tuple[Tensor | None, ...],
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    saved: tuple[Any, ...],
    support: Support,
    needs: tuple[bool, bool, bool],
) -> LinearGrads:
    """``saved``: entropy, row_max, log_sum and direction of the whole rows; statistics of the others; u."""
    (h, m, s, direction), (logprobs, entropy, _, row_max, log_sum), u = saved
    filtered = support[1][1:] > support[1][:-1]
    upstream = [None if g is None else g.to(row_max.dtype).contiguous() for g in grads]
    a, b, c = (None if g is None else torch.where(filtered, 0, g) for g in upstream)
    row = target_ids, head.temperature, head.ignore_index, entropy is not None, False, *support, True
    whole_ids = unfiltered_ids(LogprobCall(u, *row))
    result = whole._backward(impls[0], (a, b, c), hidden, weight, whole_ids, head, h, m, s, direction, needs)
    with without_autocast(hidden.device):
        values = support_products.capped(u, head)
        stats = LogprobResults(logprobs, entropy, row_max, row_max, log_sum, values)
        (grad,) = impls[1].backward(LogprobCall(values, *row), stats, RowGrads(*upstream))
        support_products.gradients(grad, u, hidden, weight, head, *support, *result)
    return result


@torch.library.custom_op("rlkernel::linear_logprob_support", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    return_entropy: bool,
    algorithm: str,
    need_direction: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
) -> list[Tensor]:
    """Logprobs, entropy and lse; what backward needs of the whole rows; of the others; u."""
    t = temperature if temperatures is None else temperatures
    head = Head(bias, t, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)
    impls, support = _pick(hidden, weight, target_ids, head, algorithm), (support_ids, support_offsets)
    options = return_entropy, algorithm, need_direction, False, support
    of_whole, stats, u = _forward(impls, hidden, weight, target_ids, head, *options)
    merged = _merged(of_whole, stats, target_ids, support, ignore_index)
    none = u.new_empty(0)
    # an output may not be another one
    every = (*merged, *of_whole[1:2], *of_whole[3:], *stats, u)
    return [none.clone() if x is None else x for x in every]


@_op.register_fake
def _op_fake(  # type: ignore[no-untyped-def]
    hidden, weight, bias, target_ids, temperatures, temperature, logit_scale, softcap, ignore_index,
    logits_dtype, compute_dtype, return_entropy, algorithm, need_direction, support_ids, support_offsets,
):  # fmt: skip
    dtype = torch.promote_types(compute_dtype, torch.float32)

    def row(there: bool = True) -> Tensor:
        return torch.empty(hidden.shape[:1] if there else 0, dtype=dtype, device=hidden.device)

    merged = row(), row(return_entropy), row()
    of_whole = row(return_entropy), row(), row()
    direction = torch.empty_like(hidden) if need_direction else row(False)
    stats = row(), row(return_entropy), row(), row(), row()
    return [*merged, *of_whole, direction, *stats, row(False).new_empty(support_ids.shape)]


@torch.library.custom_op("rlkernel::linear_logprob_support_backward", mutates_args=())
def _op_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    algorithm: str,
    need_direction: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
    saved: list[Tensor],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    t = temperature if temperatures is None else temperatures
    head = Head(bias, t, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)
    impls, support = _pick(hidden, weight, target_ids, head, algorithm), (support_ids, support_offsets)
    entropy_of_whole, row_max, log_sum, direction, logprobs, entropy, *rest, u = saved
    if grad_entropy is None:
        entropy_of_whole = entropy = None  # type: ignore[assignment]
    of_whole = entropy_of_whole, row_max, log_sum, direction if need_direction else None
    rows = of_whole, (logprobs, entropy, *rest), u
    upstream = grad_logprobs, grad_entropy, grad_lse
    grads = _backward(impls, upstream, hidden, weight, target_ids, head, rows, support, tuple(needs))  # type: ignore[arg-type]
    return tuple(row_max.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


@_op_backward.register_fake
def _op_backward_fake(grad_logprobs, grad_entropy, grad_lse, hidden, weight, bias, *rest):  # type: ignore[no-untyped-def]
    *_, saved, needs = rest
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if need and x is not None
        else saved[-1].new_empty(0)
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, bias, target_ids, temperatures, *scalars, ids, offsets = inputs
    *ctx.scalars, ctx.return_entropy, ctx.algorithm, ctx.need_direction = scalars
    ctx.save_for_backward(hidden, weight, bias, target_ids, temperatures, ids, offsets, *output[3:])
    ctx.set_materialize_grads(False)


@once_differentiable("linear_logprob")
def _autograd(ctx: Any, grads: list[Tensor | None]):  # type: ignore[no-untyped-def]
    hidden, weight, bias, target_ids, temperatures, ids, offsets, *saved = ctx.saved_tensors
    grad_logprobs, grad_entropy, grad_lse, *_ = grads
    if not ctx.return_entropy:
        grad_entropy = None
    upstream = grad_logprobs, grad_entropy, grad_lse
    needs = list(ctx.needs_input_grad[:3])
    options = ctx.algorithm, ctx.need_direction, ids, offsets, saved, needs
    inputs = hidden, weight, bias, target_ids, temperatures, *ctx.scalars
    found = _op_backward(*upstream, *inputs, *options)
    dinputs = [g if need else None for g, need in zip(found, needs, strict=True)]
    return *dinputs, *(None,) * 13


_op.register_autograd(_autograd, setup_context=_setup_context)
