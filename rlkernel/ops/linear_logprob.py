"""Log-probability of given tokens, entropy and log-sum-exp, from hidden states and the lm_head, without the
logits."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel import dispatch
from rlkernel.calls.linear_logprob import (
    EXTREMES,
    STATISTICS,
    Head,
    LinearGrads,
    LinearLogprobCall,
    LinearLogprobResults,
    LinearLogprobStatistics,
)
from rlkernel.calls.logprob import LogprobOutput, LogprobResults, RowGrads
from rlkernel.drivers import linear_logprob_support as support_driver
from rlkernel.drivers import vocab_parallel
from rlkernel.opaque import Op
from rlkernel.ops import _fp8, _support, _validate, _vocab_parallel
from rlkernel.ops._options import LinearLogprobOptions
from rlkernel.ops._typed import typed
from rlkernel.ops.logprob import row_gradient
from rlkernel.runtime import tracing
from rlkernel.runtime.modes import autocasts, without_autocast
from rlkernel.types import InputScheme, LinearAlgorithm, Statistic

ALGORITHMS = ("auto", "tiled", "fused")


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    return_entropy: Literal[True],
    **options: Unpack[LinearLogprobOptions],
) -> LogprobOutput[Tensor]: ...


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[LinearLogprobOptions],
) -> LogprobOutput[None]: ...


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    return_entropy: bool,
    **options: Unpack[LinearLogprobOptions],
) -> LogprobOutput: ...


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
    algorithm: LinearAlgorithm = "auto",
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    group: Any = None,
    vocab_start: int | None = None,
    weight_scale: Tensor | None = None,
    weight_block_size: Sequence[int] = (128, 128),
    input_scale: Tensor | InputScheme | None = None,
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
            Or float8_e4m3fn, float8_e4m3fnuz (AMD), with ``weight_scale``.
        target_ids: [...] integers in [0, V), or ``ignore_index``.
        bias: [V] or None.
        temperature: one number > 0, or one value per row [...]; not differentiable.
        logit_scale: factor of the logits before the softcap (Cohere, Granite).
        softcap: bound of the logits > 0 (Gemma's ``final_logit_softcapping``), or None.
        ignore_index: rows with this target give 0 in every output and a gradient of exactly 0.
        return_entropy: also compute the entropy.
        logits_dtype: the dtype to which the product is rounded before the softmax; fp32 rounds nothing.
        algorithm: "tiled": a library GEMM per tile and one fused kernel over it; "fused": one Triton kernel
            for the forward pass; "auto": "tiled", whose bits are those of ``linear_policy_loss``.
        support_ids: int32 or int64, the tokens that a filtered rollout kept; each once in its row.
        support_offsets: [N + 1] int32 or int64: row r keeps
            ``support_ids[support_offsets[r] : support_offsets[r + 1]]``.  A row that keeps none is whole.
        group: a ``torch.distributed`` process group whose ranks have the same ``hidden`` and each some rows
            of weight and bias, as many as it likes or none.  ``target_ids`` count in the whole vocabulary.
        vocab_start: with ``group``, the first vocabulary entry of this rank.
        weight_scale: fp32, bf16, fp16 or float8_e8m0fnu factors of an FP8 weight: [] or [1] of the whole, [V]
            or [V, 1] of each row, or [ceil(V / R), ceil(H / K)] of blocks.
        weight_block_size: (R, K), rows and columns of those blocks.
        input_scale: what ``hidden`` is rounded to FP8 with: None, not at all; one value that the checkpoint
            has; "token", a scale for each row; "group", one for each K elements of a row; "group_ue8m0", the
            same as powers of two.

    With an FP8 weight, each is multiplied with its scale and ``hidden`` is what engines make of it,

        scale = max(amax / 448, 1 / (448 * 512))  of a row, max(amax, 1e-10) / 448  of a group
        hidden = float8(clamp(hidden / scale, -448, 448)) * scale

    in fp32, with 224 in the place of 448 for e4m3fnuz.  Beside a ``hidden`` that is not rounded the scaled
    weight is, to the dtype of ``hidden``, as a dequantised one.  The weight is frozen.  The gradient of
    ``hidden`` is that of the product with the same weight, and passes the rounding as if there were none.

    With a group, every rank gets the outputs of the whole head, to the bit the same ones; the bits depend on
    the number of ranks.  Each rank must compute the same loss from them.  The gradient of ``hidden`` is then
    the whole one, summed over the ranks in their order; the weight's and the bias's are of the rank's rows.

    ``weight`` and ``bias`` may be DTensors.  A mesh dimension named "tp" or "vocab" that splits the
    vocabulary is its group.  Over any other dimension the parts are gathered, and their gradient is the mean
    over its ranks, as FSDP2 wants it of the sharded parameters of a module outside its call.

    With a support, row r is the softmax over the tokens that it keeps, as in ``logprob``.  Such a row
    multiplies their rows of the weight and no others: ``2 nnz H`` operations a pass instead of ``2 N H V``.
    Whole rows are computed, to the bit, as without supports.

    Returns:
        LogprobOutput of [...] tensors in nats, fp32 (fp64 for fp64 input).

    Raises:
        ValueError: as ``logprob``.

    Follows TRL's ``ChunkedLogProbFunction``, apple/ml-cross-entropy (arXiv 2411.09009) and Unsloth's
    frozen-head trick.

    Examples:
        >>> hidden, lm_head, ids = torch.randn(3, 16), torch.randn(100, 16), torch.tensor([7, 99, -100])
        >>> out = rlkernel.linear_logprob(hidden, lm_head, ids, return_entropy=True)
        >>> out.logprobs.shape, out.entropy.shape, out.logprobs[-1]
        (torch.Size([3]), torch.Size([3]), tensor(0.))
    """
    block, is_fp8 = _fp8.block_size(weight_block_size), weight_scale is not None or _fp8.is_fp8(weight)
    if is_fp8 or input_scale is not None:
        _fp8.asks(weight, weight_scale, input_scale)
    weight, bias, group, vocab_start = _vocab_parallel.local_head(weight, bias, group, vocab_start)
    group, first = _vocab_parallel.named(group, vocab_start)
    head = checked_head(
        hidden, weight, bias=bias, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        ignore_index=ignore_index, logits_dtype=logits_dtype, sharded=group is not None, is_fp8=is_fp8,
    )  # fmt: skip
    _vocab_parallel.no_support(support_ids, group)
    fp8 = {}
    if weight_scale is not None:
        _fp8.no_support(support_ids)
        fp8 = _fp8.fields(hidden, weight, weight_scale, block, input_scale)
    outputs = _call(
        hidden, weight, target_ids, head, return_entropy=return_entropy, algorithm=algorithm,
        support_ids=support_ids, support_offsets=support_offsets, group=group, vocab_start=first, **fp8,
    )  # fmt: skip
    return LogprobOutput(*outputs[:3])


@typed
def linear_logprob_statistics(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    statistics: tuple[Statistic, ...] = STATISTICS[:3],
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    algorithm: LinearAlgorithm = "auto",
) -> LinearLogprobStatistics:
    """``linear_logprob``, with what trainers log of each row, from the same tiles.

    Equal to, with ``z = logits / temperature``,

        mean_logits = z.mean(-1)
        is_top1 = z.gather(-1, target_ids) >= z.amax(-1)
        log_sum_sq_probs = (2 * z.log_softmax(-1)).logsumexp(-1)
        min_logits, max_logits = z.amin(-1), z.amax(-1)

    Logprobs, entropy and lse, and their gradients, have the bits of ``linear_logprob`` by the same algorithm;
    "auto" is "tiled".
    Each statistic costs a fraction of the product: a second running softmax over the tile that is there, a
    comparison, and a product with the mean of the weight (with a softcap, another look at the tile); the
    smallest and the largest logit one look.

    Args:
        statistics: names of those to compute, of the five above; the last two by tiles alone.

    Returns:
        LinearLogprobStatistics of [...] tensors; what is not asked for is None.

    Raises:
        ValueError: as ``linear_logprob``; a statistic is not known, or not of the algorithm.

    Follows the optional outputs of TRL's ``ChunkedLogProbFunction``, which its DPO, KTO and SFT log, and what
    AReaL logs of a vocabulary's logits.

    Examples:
        >>> hidden, lm_head = torch.eye(3), 5 * torch.eye(3)
        >>> rlkernel.linear_logprob_statistics(hidden, lm_head, torch.tensor([0, 1, 0])).is_top1
        tensor([ True,  True, False])
    """
    _validate.choice("algorithm", algorithm, ALGORITHMS)
    if isinstance(statistics, str) or not isinstance(statistics, Sequence):
        raise ValueError(f"statistics must be a tuple of names, got {statistics!r}")
    for name in statistics:
        if not isinstance(name, str) or name not in STATISTICS:
            raise ValueError(f"statistics must be among {', '.join(map(repr, STATISTICS))}, got {name!r}")
        if name in EXTREMES and algorithm == "fused":
            raise ValueError(f"algorithm must be 'tiled' with {name}, got 'fused'")
    head = checked_head(
        hidden, weight, bias=bias, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        ignore_index=ignore_index, logits_dtype=logits_dtype,
    )  # fmt: skip
    outputs = _call(
        hidden, weight, target_ids, head, return_entropy=return_entropy,
        algorithm="tiled" if algorithm == "auto" else algorithm, statistics=tuple(statistics),
    )  # fmt: skip
    return LinearLogprobStatistics(*outputs)


def _call(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    *,
    algorithm: str,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    _validate.choice("algorithm", algorithm, ALGORITHMS)
    target_ids = checked_ids(target_ids, hidden)
    bias, rows = head.bias, hidden.shape[:-1]
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    # the direction of one rank's entries is not that of the whole vocabulary
    need_direction = torch.is_grad_enabled() and hidden.requires_grad and not trained
    group = options.get("group")
    cut = support_ids is None and not options.get("statistics")
    parts = _vocab_parallel.parts_of(group, options.get("vocab_start", 0), len(weight), whole=not cut)
    need_direction = need_direction and group is None and parts == 1
    # a backward pass will want the logits again
    keep = torch.is_grad_enabled() and trained and not tracing.is_on()
    if len(rows) != 1:
        hidden, target_ids = hidden.reshape(-1, hidden.shape[-1]), target_ids.reshape(-1)
    support = _support.checked(
        support_ids, support_offsets, target_ids.numel(), weight.shape[0], hidden.device
    )
    ids, offsets = support or (None, None)
    options |= {"support_ids": ids, "support_offsets": offsets, "algorithm": algorithm, "parts": parts}
    outputs = op(
        LinearLogprobCall.of(
            hidden, weight, target_ids, head, need_direction=need_direction, keep=keep, **options
        )
    )
    return tuple(outputs if len(rows) == 1 else (None if x is None else x.view(rows) for x in outputs))


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    logits_dtype: torch.dtype,
    sharded: bool = False,
    is_fp8: bool = False,
    prefix: str = "",
) -> Head:
    """What is between the product and the softmax; raises ValueError, also for the product's operands.

    The weight of a rank's shard may have no rows.  ``prefix``: of the names of arguments in errors."""
    of_hidden, of_weight, of_bias = (f"{prefix}{name}" for name in ("hidden", "weight", "bias"))
    _validate.floating(of_hidden, hidden)
    if not is_fp8:
        _validate.floating(of_weight, weight)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"{of_hidden} must be [..., H] with H >= 1, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or not (len(weight) or sharded):
        raise ValueError(
            f"{of_weight} must be [V, {hidden.shape[-1]}] with V >= 1, got {tuple(weight.shape)}"
        )
    _validate.same_device(of_weight, weight, of_hidden, hidden.device)
    if bias is not None:
        _validate.floating(of_bias, bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{of_bias} must be [{weight.shape[0]}], got {tuple(bias.shape)}")
        _validate.same_device(of_bias, bias, of_hidden, hidden.device)
    rows = hidden.shape[:-1]
    compute_dtype = _compute_dtype(hidden, hidden if is_fp8 else weight)
    temperature = _validate.temperature(temperature, rows, compute_dtype, hidden.device)
    logit_scale = _validate.number(f"{prefix}logit_scale", logit_scale)
    if softcap is not None:
        softcap = _validate.number(
            f"{prefix}softcap", softcap, 0.0, above=True, want="> 0 and finite, or None"
        )
    if not isinstance(logits_dtype, torch.dtype) or logits_dtype not in _validate.FLOATS[:3]:
        raise ValueError(f"logits_dtype must be float16, bfloat16 or float32, got {logits_dtype}")
    if logits_dtype not in (torch.float32, compute_dtype) and compute_dtype.itemsize < 4:
        want = f"float32 or the {_validate.name(compute_dtype)} of the inputs"
        raise ValueError(f"logits_dtype must be {want}, got {_validate.name(logits_dtype)}")
    temperature = temperature.reshape(-1) if isinstance(temperature, Tensor) else temperature
    return Head(bias, temperature, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)


def checked_ids(target_ids: Tensor, hidden: Tensor) -> Tensor:
    """As dense int64."""
    rows = hidden.shape[:-1]
    return _validate.target_ids(target_ids, rows, "the rows of hidden", hidden.device).contiguous()


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    widest = torch.promote_types(hidden.dtype, weight.dtype)
    if autocasts(hidden.device) and widest != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return widest


def _pick(call: LinearLogprobCall) -> tuple[ModuleType, ModuleType | None]:
    """Who multiplies, and who takes the logits at the supports, which are fp32 (fp64 for fp64 input)."""
    options: dict[str, Any] = {"compute_dtype": call.compute_dtype, "algorithm": call.algorithm}
    if call.weight_scale is not None:
        options |= {"input_scheme": call.input_scheme, "steps": (call.input_group, call.weight_block[-1])}
    impl = dispatch.pick("linear_logprob", call.hidden, call.weight, **options)
    if call.support_ids is None:
        return impl, None
    wide = torch.promote_types(call.compute_dtype, torch.float32)
    logits = torch.empty(0, dtype=wide, device=call.hidden.device)
    return impl, dispatch.pick("logprob", logits, call.target_ids)


def _forward(impls: tuple[ModuleType, ModuleType | None], call: LinearLogprobCall) -> LinearLogprobResults:
    impl, rows = impls
    vocab = call.weight.shape[0]
    _fp8.values(call)
    if call.group is None:
        _validate.values(call.target_ids, vocab, call.temperature, call.ignore_index)
    else:
        _vocab_parallel.check(call, vocab)
    with without_autocast(call.hidden.device):
        if call.group is not None or call.parts > 1:
            results = vocab_parallel.forward(impl, call, vocab)
        else:
            results = impl.forward(call) if rows is None else support_driver.forward(impl, rows, call)
    _validate.healthy("hidden", results.lse)
    return results


def _backward(
    impls: tuple[ModuleType, ModuleType | None],
    call: LinearLogprobCall,
    results: LinearLogprobResults,
    grads: tuple[Tensor | None, ...],
) -> LinearGrads:
    upstream = RowGrads(*(row_gradient(g, results.row_max) for g in grads[:3]))
    impl, rows = impls
    with without_autocast(call.hidden.device):
        if call.group is not None or call.parts > 1:
            return vocab_parallel.backward_head(impl, call, results, upstream)
        if rows is None:
            return impl.backward(call, results, upstream)
        return support_driver.backward(impl, rows, call, results, upstream)


def _like(call: LinearLogprobCall) -> LinearLogprobResults:
    dtype, count = torch.promote_types(call.compute_dtype, torch.float32), call.hidden.shape[0]
    row = functools.partial(torch.empty, count, device=call.hidden.device)
    statistics = {name: row(dtype=torch.bool if name == "is_top1" else dtype) for name in call.statistics}
    entropy = row(dtype=dtype) if call.return_entropy else None
    rows = LogprobResults(row(dtype=dtype), entropy, row(dtype=dtype), row(dtype=dtype), row(dtype=dtype))
    products = None
    if call.support_ids is not None:
        products = call.hidden.new_empty(call.support_ids.shape, dtype=dtype)
    direction = torch.empty_like(call.hidden) if call.need_direction else None
    return LinearLogprobResults.of(rows, direction=direction, products=products, **statistics)


op = Op(
    "linear_logprob",
    LinearLogprobCall,
    LinearLogprobResults,
    outputs=8,
    pick=_pick,
    forward=_forward,
    backward=_backward,
    like=_like,
    gradients=("hidden", "weight", "bias"),
    differentiable=("logprobs", "entropy", "lse"),
    saves=(
        "hidden", "weight", "bias", "target_ids", "temperature", "support_ids", "support_offsets",
        "logprobs", "entropy", "row_max", "log_sum", "direction", "products", "weight_scale",
        "input_scale",
    ),
)  # fmt: skip
