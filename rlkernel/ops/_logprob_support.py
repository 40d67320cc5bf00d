"""``logprob`` over supports: autograd in eager mode, and the custom op under torch.compile."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.ops import _validate
from rlkernel.runtime.modes import once_differentiable
from rlkernel.types import LogprobOutput, RowGrads

# logprobs, entropy, lse, row_max, log_sum, and the logits at the supports
Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]


def logprob(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    return_entropy: bool,
    inplace_backward: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
) -> LogprobOutput:
    """``rlkernel.logprob`` with a support; the arguments are checked already."""
    if torch.compiler.is_compiling():
        scalar, tensor = (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)
        options = ignore_index, return_entropy, support_ids, support_offsets
        logprobs, entropy, lse, *_ = _op(logits, target_ids, tensor, scalar, *options)
        return LogprobOutput(logprobs, entropy if return_entropy else None, lse)
    arguments = temperature, ignore_index, return_entropy, inplace_backward, support_ids, support_offsets
    return LogprobOutput(*_Logprob.apply(logits, target_ids, *arguments))


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, logits, target_ids, temperature, ignore_index, return_entropy, inplace, ids, offsets
    ):
        ctx.set_materialize_grads(False)
        # backward runs on the same backend, also on another thread or after the block that forced it
        ctx.impl = dispatch.pick("logprob", logits, target_ids)
        options = temperature, ignore_index, return_entropy, ids, offsets
        stats = _forward(ctx.impl, logits, target_ids, *options)
        per_row = temperature if isinstance(temperature, Tensor) else None
        ctx.save_for_backward(logits, target_ids, per_row, ids, offsets, *stats)
        ctx.temperature = None if per_row is not None else temperature
        ctx.ignore_index, ctx.inplace, ctx.overwritten = ignore_index, inplace, False
        return stats[:3]

    @staticmethod
    @once_differentiable("logprob")
    def backward(ctx: Any, *grads: Any):  # type: ignore[no-untyped-def]
        if ctx.overwritten:
            raise RuntimeError(
                "inplace_backward must be False for a second backward, got True: logits are gone"
            )
        if all(g is None for g in grads):
            return (None,) * 8
        logits, target_ids, per_row, ids, offsets, *stats = ctx.saved_tensors
        temperature = per_row if per_row is not None else ctx.temperature
        if ctx.inplace:
            ctx.overwritten = True
            # other users of the logits in this graph then raise instead of computing nonsense
            torch.autograd.graph.increment_version(logits)
        options = temperature, ctx.ignore_index, ids, offsets
        return _backward(ctx.impl, grads, logits, target_ids, *options, tuple(stats), ctx.inplace), *(
            None,
        ) * 7


def _forward(
    impl: ModuleType,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    return_entropy: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
) -> Stats:
    _validate.values(target_ids, logits.shape[-1], temperature, ignore_index)
    options = temperature, ignore_index, return_entropy, support_ids, support_offsets, False
    stats = impl.support_forward(logits, target_ids, *options)
    _validate.healthy("logits", stats[2])
    return stats


def _backward(
    impl: ModuleType,
    grads: RowGrads,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    support_ids: Tensor,
    support_offsets: Tensor,
    stats: Stats,
    inplace: bool,
) -> Tensor:
    """Whole rows by ``backward``, to which rows with a support are ignored ones: it leaves zeros there."""
    logprobs, entropy, _, row_max, log_sum, values = stats
    upstream = [None if g is None else g.to(row_max.dtype).contiguous() for g in grads]
    whole_ids = without_support(target_ids, support_offsets, ignore_index)
    grad = impl.backward(
        *upstream, logits, whole_ids, temperature, ignore_index, entropy, row_max, log_sum, inplace
    )
    return impl.support_backward(
        *upstream, values, target_ids, temperature, ignore_index, support_ids, support_offsets, logprobs,
        entropy, row_max, log_sum, grad,
    )  # fmt: skip


def without_support(target_ids: Tensor, support_offsets: Tensor, ignore_index: int) -> Tensor:
    """``target_ids``, with ``ignore_index`` for the rows that have a support."""
    supported = (support_offsets[1:] > support_offsets[:-1]).view(target_ids.shape)
    return torch.where(supported, ignore_index, target_ids)


@torch.library.custom_op("rlkernel::logprob_support", mutates_args=())
def _op(
    logits: Tensor,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    ignore_index: int,
    return_entropy: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    t = temperature if temperatures is None else temperatures
    impl = dispatch.pick("logprob", logits, target_ids)
    options = t, ignore_index, return_entropy, support_ids, support_offsets
    logprobs, entropy, *rest = _forward(impl, logits, target_ids, *options)
    return logprobs, logprobs.new_empty(0) if entropy is None else entropy, *rest  # type: ignore[return-value]


@_op.register_fake
def _op_fake(  # type: ignore[no-untyped-def]
    logits, target_ids, temperatures, temperature, ignore_index, return_entropy, support_ids, support_offsets
):
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = [torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device) for _ in range(5)]
    if not return_entropy:
        rows[1] = rows[0].new_empty(0)
    return *rows, logits.new_empty(support_ids.shape)


@torch.library.custom_op("rlkernel::logprob_support_backward", mutates_args=())
def _op_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    ignore_index: int,
    support_ids: Tensor,
    support_offsets: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    lse: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    values: Tensor,
) -> Tensor:
    t = temperature if temperatures is None else temperatures
    grads = (grad_logprobs, grad_entropy, grad_lse)
    impl = dispatch.pick("logprob", logits, target_ids)
    stats = logprobs, entropy, lse, row_max, log_sum, values
    options = t, ignore_index, support_ids, support_offsets
    return _backward(impl, grads, logits, target_ids, *options, stats, False)


@_op_backward.register_fake
def _op_backward_fake(grad_logprobs, grad_entropy, grad_lse, logits, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target_ids, temperatures, temperature, ignore_index, return_entropy, ids, offsets = inputs
    ctx.save_for_backward(logits, target_ids, temperatures, ids, offsets, *output)
    ctx.temperature, ctx.ignore_index, ctx.return_entropy = temperature, ignore_index, return_entropy
    ctx.set_materialize_grads(False)


@once_differentiable("logprob")
def _autograd(ctx: Any, grad_logprobs, grad_entropy, grad_lse, *unused):  # type: ignore[no-untyped-def]
    logits, target_ids, temperatures, ids, offsets, *stats = ctx.saved_tensors
    if not ctx.return_entropy:
        grad_entropy = None
    if grad_entropy is None:
        stats[1] = None
    options = temperatures, ctx.temperature, ctx.ignore_index, ids, offsets
    grads = grad_logprobs, grad_entropy, grad_lse
    return _op_backward(*grads, logits, target_ids, *options, *stats), *(None,) * 7


_op.register_autograd(_autograd, setup_context=_setup_context)
