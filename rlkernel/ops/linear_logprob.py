"""Log-probability of given tokens, entropy and log-sum-exp, from hidden states and the lm_head, without the
logits."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.logprob import LogprobOutput, RowGrads
from rlkernel.drivers.linear_logprob_statistics import NAMES, Statistics
from rlkernel.ops import _linear_support, _support, _validate
from rlkernel.ops._typed import typed
from rlkernel.ops.logprob import row_gradient
from rlkernel.runtime.modes import autocasts, once_differentiable, without_autocast
from rlkernel.types import (
    Head,
    LinearGrads,
    LinearLogprobStatistics,
    LinearStats,
)

ALGORITHMS = ("auto", "tiled", "fused")


@typed
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    algorithm: str = "auto",
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
) -> LogprobOutput:
    """Log-probability of each target token under the lm_head, without ever holding the ``[N, V]`` logits.

    Equal to ``logprob(z, target_ids, temperature=T)`` of ``z = softcap * tanh(u / softcap)`` (``z = u``
    without a softcap) with ``u = (hidden @ weight.T + bias) * logit_scale``.

    The logits exist one tile at a time in a workspace whose size is a setting
    (``rlkernel.workspace.set_limit``) and does not depend on N.  Backward recomputes them: four GEMMs of ``2
    N H V`` operations in all.  Rows that are ignored cost nothing, rows whose upstream gradient is exactly 0
    nothing in backward, and with a frozen head (neither weight nor bias requires a gradient) forward already
    computes the direction of the hidden gradient: two GEMMs in all.  The weight's gradient accumulates in
    fp32, one slice of the vocabulary at a time.

    The same call gives the same bits (run-to-run), with and without gradients, so that old and new logprobs
    agree exactly on-policy.

    Args:
        hidden: [..., H] fp16, bf16, fp32 or fp64.
        weight: [V, H]; under autocast both are used in autocast's dtype, else in the wider of the two dtypes.
        target_ids: [...] integers in [0, V), or ``ignore_index``.
        bias: [V] or None.
        temperature: one number > 0, or one value per row [...]; not differentiable.
        logit_scale: factor of the logits before the softcap (Cohere, Granite).
        softcap: bound of the logits > 0 (Gemma's ``final_logit_softcapping``), or None.
        ignore_index: rows with this target give 0 in every output and a gradient of exactly 0.
        return_entropy: also compute the entropy.
        logits_dtype: the dtype to which the product is rounded before the softmax; fp32 rounds nothing.
        algorithm: "tiled": a library GEMM per tile and one fused kernel over it; "fused": one Triton kernel
            for the forward pass; "auto": the one that was measured faster on this device.  The choice never
            depends on whether gradients are needed.
        support_ids: int32 or int64, the tokens that a filtered rollout kept; each once in its row.
        support_offsets: [N + 1] int32 or int64: row r keeps
            ``support_ids[support_offsets[r] : support_offsets[r + 1]]``.  A row that keeps none is whole.

    With a support, row r is the softmax over the tokens that it keeps, as in ``logprob``.  Such a row
    multiplies their rows of the weight and no others: ``2 nnz H`` operations a pass instead of ``2 N H V``.
    Whole rows are computed, to the bit, as without supports.

    Returns:
        LogprobOutput of [...] tensors in nats, fp32 (fp64 for fp64 input).

    Raises:
        ValueError: as ``logprob``.

    Follows TRL's ``ChunkedLogProbFunction``, apple/ml-cross-entropy (arXiv 2411.09009) and Unsloth's
    frozen-head trick.
    """
    options = bias, temperature, logit_scale, softcap, ignore_index, logits_dtype
    support = support_ids, support_offsets
    outputs = _call(hidden, weight, target_ids, options, return_entropy, algorithm, (), support)
    return LogprobOutput(*outputs[:3])


@typed
def linear_logprob_statistics(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    statistics: tuple[str, ...] = NAMES,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: torch.dtype = torch.float32,
) -> LinearLogprobStatistics:
    """``linear_logprob``, with what trainers log of each row, from the same tiles.

    Equal to, with ``z = logits / temperature``,

        mean_logits = z.mean(-1)
        is_top1 = z.gather(-1, target_ids) >= z.amax(-1)
        log_sum_sq_probs = (2 * z.log_softmax(-1)).logsumexp(-1)

    Logprobs, entropy and lse, and their gradients, have the bits of ``linear_logprob(algorithm="tiled")``.
    Each statistic costs a fraction of the product: a second running softmax over the tile that is there, a
    comparison, and a product with the mean of the weight (with a softcap, another look at the tile).

    Args:
        statistics: names of those to compute, of the three above.

    Returns:
        LinearLogprobStatistics of [...] tensors; what is not asked for is None.

    Raises:
        ValueError: as ``linear_logprob``; a statistic is not known.

    Follows the optional outputs of TRL's ``ChunkedLogProbFunction``, which its DPO, KTO and SFT log.
    """
    if isinstance(statistics, str) or not isinstance(statistics, Sequence):
        raise ValueError(f"statistics must be a tuple of names, got {statistics!r}")
    for name in statistics:
        if not isinstance(name, str) or name not in NAMES:
            raise ValueError(f"statistics must be among {', '.join(map(repr, NAMES))}, got {name!r}")
    options = bias, temperature, logit_scale, softcap, ignore_index, logits_dtype
    outputs = _call(hidden, weight, target_ids, options, return_entropy, "tiled", tuple(statistics))
    return LinearLogprobStatistics(*outputs)


def _call(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    options: tuple[Any, ...],
    return_entropy: bool,
    algorithm: str,
    statistics: tuple[str, ...],
    support: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Any, ...]:
    target_ids, head = checked_head(hidden, weight, target_ids, *options)
    _validate.choice("algorithm", algorithm, ALGORITHMS)

    bias = head.bias
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    need_direction = torch.is_grad_enabled() and hidden.requires_grad and not trained
    keep = torch.is_grad_enabled() and trained  # a backward pass will want the logits again
    rows, flat, ids = hidden.shape[:-1], hidden, target_ids
    if len(rows) != 1:
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), target_ids.reshape(-1)
    supported = _support.checked(*support, ids.numel(), weight.shape[0], hidden.device)
    if supported is not None:
        choices = head, return_entropy, algorithm, need_direction, keep, supported
        some = _linear_support.linear_logprob(flat, weight, ids, *choices)
        outputs = (*some, *(ids for _ in NAMES))  # nobody asks for these
    elif torch.compiler.is_compiling():
        head_parts = _scalars(head)
        names = ",".join(statistics)
        every = _op(flat, weight, bias, ids, *head_parts, return_entropy, algorithm, need_direction, names)
        outputs = (*every[:3], *every[6:])
    else:
        outputs = _LinearLogprob.apply(
            flat, weight, bias, ids, head, (return_entropy, algorithm, need_direction, keep, statistics)
        )
    wanted = (True, return_entropy, True, *(name in statistics for name in NAMES))
    some = [x if want else None for x, want in zip(outputs, wanted, strict=True)]
    return tuple(some if len(rows) == 1 else (None if x is None else x.view(rows) for x in some))


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    logits_dtype: torch.dtype,
) -> tuple[Tensor, Head]:
    """``target_ids`` as int64, and what stands between the product and the softmax; raises ValueError."""
    _validate.floating("hidden", hidden)
    _validate.floating("weight", weight)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., H] with H >= 1, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight must be [V, {hidden.shape[-1]}] with V >= 1, got {tuple(weight.shape)}")
    _validate.same_device("weight", weight, "hidden", hidden.device)
    if bias is not None:
        _validate.floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
        _validate.same_device("bias", bias, "hidden", hidden.device)
    rows = hidden.shape[:-1]
    target_ids = _validate.target_ids(target_ids, rows, "the rows of hidden", hidden.device)
    compute_dtype = _compute_dtype(hidden, weight)
    temperature = _validate.temperature(temperature, rows, compute_dtype, hidden.device)
    if not -math.inf < logit_scale < math.inf:
        raise ValueError(f"logit_scale must be finite, got {logit_scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be > 0 and finite, or None, got {softcap}")
    if not isinstance(logits_dtype, torch.dtype) or logits_dtype not in _validate.FLOATS[:3]:
        raise ValueError(f"logits_dtype must be float16, bfloat16 or float32, got {logits_dtype}")
    if logits_dtype not in (torch.float32, compute_dtype) and compute_dtype.itemsize < 4:
        want = f"float32 or the {_validate.name(compute_dtype)} of the inputs"
        raise ValueError(f"logits_dtype must be {want}, got {_validate.name(logits_dtype)}")
    head = Head(bias, temperature, float(logit_scale), softcap, ignore_index, logits_dtype, compute_dtype)
    if isinstance(temperature, Tensor):
        head = head._replace(temperature=temperature.reshape(-1))
    return target_ids, head


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    widest = torch.promote_types(hidden.dtype, weight.dtype)
    if autocasts(hidden.device) and widest != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return widest


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        hidden,
        weight,
        bias,
        target_ids,
        head,
        options,
    ):
        ctx.set_materialize_grads(False)
        # backward runs on the same backend, also on another thread or after the block that forced it
        ctx.impl = _pick(hidden, weight, head, options[1])
        stats, more = _forward(ctx.impl, hidden, weight, target_ids, head, *options)
        if options[-1]:
            ctx.mark_non_differentiable(*(x for x in more if x is not None))
        logprobs, entropy, lse, row_max, log_sum, direction = stats
        per_row = head.temperature if isinstance(head.temperature, Tensor) else None
        ctx.save_for_backward(hidden, weight, bias, target_ids, per_row, entropy, row_max, log_sum, direction)
        ctx.head = head
        if bias is not None or per_row is not None:  # tensors are saved, as torch wants it
            ctx.head = head._replace(bias=None, temperature=1.0 if per_row is not None else head.temperature)
        return logprobs, entropy, lse, *more

    @staticmethod
    @once_differentiable("linear_logprob")
    def backward(ctx: Any, *grads: Any):  # type: ignore[no-untyped-def]
        grads = grads[:3]
        if all(g is None for g in grads):
            return (None,) * 6
        hidden, weight, bias, target_ids, per_row, entropy, row_max, log_sum, direction = ctx.saved_tensors
        head = ctx.head if bias is None else ctx.head._replace(bias=bias)
        if per_row is not None:
            head = head._replace(temperature=per_row)
        stats, needs = (entropy, row_max, log_sum, direction), ctx.needs_input_grad[:3]
        result = _backward(ctx.impl, grads, hidden, weight, target_ids, head, *stats, needs)
        return *result, None, None, None


def _pick(hidden: Tensor, weight: Tensor, head: Head, algorithm: str) -> ModuleType:
    options = {"compute_dtype": head.compute_dtype, "algorithm": algorithm}
    return dispatch.pick("linear_logprob", hidden, weight, **options)


def _forward(
    impl: ModuleType,
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    algorithm: str,
    need_direction: bool,
    keep: bool,
    statistics: tuple[str, ...],
) -> tuple[LinearStats, Statistics]:
    _validate.values(target_ids, weight.shape[0], head.temperature, head.ignore_index)
    with without_autocast(hidden.device):
        if statistics:
            options = return_entropy, need_direction, keep, statistics
            stats, more = impl.statistics(hidden, weight, target_ids, head, *options)
        else:
            stats = impl.forward(
                hidden, weight, target_ids, head, return_entropy, algorithm, need_direction, keep
            )
            more = (None, None, None)
    _validate.healthy("hidden", stats[2])
    return stats, more


def _backward(
    impl: ModuleType,
    grads: tuple[Tensor | None, ...],
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    direction: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> LinearGrads:
    upstream = RowGrads(*(row_gradient(g, row_max) for g in grads))
    stats = entropy, row_max, log_sum, direction
    with without_autocast(hidden.device):
        return impl.backward(upstream, hidden, weight, target_ids, head, *stats, needs)


# The op under torch.compile: one opaque node each for forward and backward.  A custom op takes and gives
# tensors and scalars, so a head is taken apart, and what is absent is an empty tensor.


def _scalars(head: Head) -> tuple[Any, ...]:
    per_row = isinstance(head.temperature, Tensor)
    t, temperature = (head.temperature, 1.0) if per_row else (None, head.temperature)
    return t, temperature, *head[2:]


@torch.library.custom_op("rlkernel::linear_logprob", mutates_args=())
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
    statistics: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    t = temperature if temperatures is None else temperatures
    head = Head(bias, t, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)
    impl = _pick(hidden, weight, head, algorithm)
    names = tuple(statistics.split(",")) if statistics else ()
    options = return_entropy, algorithm, need_direction, False, names
    stats, more = _forward(impl, hidden, weight, target_ids, head, *options)
    return tuple(stats[0].new_empty(0) if x is None else x for x in (*stats, *more))  # type: ignore[return-value]


@_op.register_fake
def _op_fake(  # type: ignore[no-untyped-def]
    hidden, weight, bias, target_ids, temperatures, temperature, logit_scale, softcap, ignore_index,
    logits_dtype, compute_dtype, return_entropy, algorithm, need_direction, statistics="",
):  # fmt: skip
    dtype = torch.promote_types(compute_dtype, torch.float32)
    rows = [torch.empty(hidden.shape[:1], dtype=dtype, device=hidden.device) for _ in range(5)]
    if not return_entropy:
        rows[1] = rows[0].new_empty(0)
    direction = torch.empty_like(hidden) if need_direction else rows[0].new_empty(0)
    more = (
        torch.empty_like(rows[0], dtype=torch.bool if name == "is_top1" else dtype)
        if name in statistics.split(",")
        else rows[0].new_empty(0)
        for name in NAMES
    )
    return *rows, direction, *more


@torch.library.custom_op("rlkernel::linear_logprob_backward", mutates_args=())
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
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    direction: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    t = temperature if temperatures is None else temperatures
    head = Head(bias, t, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)
    impl = _pick(hidden, weight, head, algorithm)
    upstream = (grad_logprobs, grad_entropy, grad_lse)
    stats = entropy, row_max, log_sum, direction
    grads = _backward(impl, upstream, hidden, weight, target_ids, head, *stats, tuple(needs))  # type: ignore[arg-type]
    return tuple(row_max.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


@_op_backward.register_fake
def _op_backward_fake(grad_logprobs, grad_entropy, grad_lse, hidden, weight, bias, *rest):  # type: ignore[no-untyped-def]
    *_, row_max, _, _, needs = rest
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if need and x is not None
        else row_max.new_empty(0)
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target_ids, temperatures, *scalars = inputs
    _, entropy, _, row_max, log_sum, direction, *more = output
    ctx.mark_non_differentiable(*more)
    ctx.save_for_backward(
        hidden, weight, bias, target_ids, temperatures, entropy, row_max, log_sum, direction
    )
    *ctx.scalars, ctx.return_entropy, ctx.algorithm, ctx.need_direction, _ = scalars
    ctx.set_materialize_grads(False)


@once_differentiable("linear_logprob")
def _autograd(ctx: Any, grad_logprobs, grad_entropy, grad_lse, *unused):  # type: ignore[no-untyped-def]
    *inputs, entropy, row_max, log_sum, direction = ctx.saved_tensors
    upstream = grad_logprobs, grad_entropy if ctx.return_entropy else None, grad_lse
    entropy = entropy if upstream[1] is not None else None
    stats = entropy, row_max, log_sum, direction if ctx.need_direction else None
    needs = list(ctx.needs_input_grad[:3])
    grads = _op_backward(*upstream, *inputs, *ctx.scalars, ctx.algorithm, *stats, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 12


_op.register_autograd(_autograd, setup_context=_setup_context)
