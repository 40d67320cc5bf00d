"""Log-probability of given tokens, entropy and log-sum-exp, from logits."""

import functools
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel.calls.logprob import LogprobCall, LogprobOutput, LogprobResults, RowGrads
from rlkernel.drivers import vocab_parallel
from rlkernel.opaque import Op
from rlkernel.ops import _support, _validate, _vocab_parallel
from rlkernel.ops._direct import direct
from rlkernel.ops._options import LogprobOptions
from rlkernel.ops._typed import typed


@overload
def logprob(
    logits: Tensor,
    target_ids: Tensor,
    *,
    return_entropy: Literal[True],
    **options: Unpack[LogprobOptions],
) -> LogprobOutput[Tensor]: ...


@overload
def logprob(
    logits: Tensor,
    target_ids: Tensor,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[LogprobOptions],
) -> LogprobOutput[None]: ...


@overload
def logprob(
    logits: Tensor,
    target_ids: Tensor,
    *,
    return_entropy: bool,
    **options: Unpack[LogprobOptions],
) -> LogprobOutput: ...


@direct
@typed
def logprob(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    group: Any = None,
    vocab_start: int | None = None,
) -> LogprobOutput:
    """Log-probability of each target token under ``softmax(logits / T)``, in one pass over the logits.

    Equal to ``log_softmax(logits / T, -1)`` gathered at ``target_ids``; ``entropy = -sum(p * log p)`` and
    ``lse = logsumexp(logits / T)`` of the same distribution.  All three are differentiable; the gradient is

        (g_logprobs * (1[i = target] - p_i) + g_lse * p_i - g_entropy * p_i * (log p_i + entropy)) / T.

    A row's bits depend on that row alone: not on the other rows, their number, its place among them, the
    memory layout or the number of threads (batch-invariant); the same call gives the same bits (run-to-run),
    gradients included.

    Args:
        logits: [..., V] fp16, bf16, fp32 or fp64, any strides on the leading dimensions: the ``[:, :-1]``
            view of ``[B, L+1, V]`` is not copied.
        target_ids: [...] integers in [0, V), or ``ignore_index``.
        temperature: one number > 0, or a tensor with one value per row [...]; not differentiable.
        ignore_index: rows with this target give 0 in every output and a gradient of exactly 0, whatever they
            hold.
        return_entropy: also compute the entropy.
        inplace_backward: let backward write the gradient over the logits, which saves a tensor of their size.
            A second backward through the same graph then raises.
        support_ids: int32 or int64, the tokens that a filtered rollout kept (``SampleOutput.support_ids``,
            vLLM's and slime's sampling masks); each once in its row, in any order.
        support_offsets: [N + 1] int32 or int64 over the N rows: row r keeps
            ``support_ids[support_offsets[r] : support_offsets[r + 1]]``.  A row that keeps none is whole.
        group: a ``torch.distributed`` process group whose ranks have the same rows and each some entries of
            the vocabulary, as many as it likes or none.  ``target_ids`` count in the whole of it.
        vocab_start: with ``group``, the first entry of this rank.  A DTensor of logits that is split over its
            last dimension needs neither.

    With a group, every rank gets the outputs of the whole vocabulary, to the bit the same ones, which one
    gather of a few numbers a row takes; the bits depend on the number of ranks, but not under
    ``rlkernel.batch_invariant(level="tensor_parallel")``.  Each rank must compute the same loss from them, as
    the gradient of its logits is then whole without a word from the others.

    With a support, row r is ``softmax`` of the logits that it keeps, and its gradient is 0 elsewhere; a
    target that it does not keep has ``logprobs = -inf`` and no gradient.  All rows, the whole ones too, then
    have the bits of ``sample``'s ``processed_logprobs``: on-policy, the ratio is exactly 1.

    Returns:
        LogprobOutput of [...] tensors in nats, fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  Values of ``target_ids``
            and of a temperature tensor are checked on a CPU, and on a GPU only in debug mode
            (``RLKERNEL_DEBUG=1``), because that synchronises; without the check a target outside the
            vocabulary gives NaN.  A row that is -inf everywhere, or holds NaN or +inf, gives NaN; debug mode
            raises.

    Follows ``selective_log_softmax`` of TRL and ``logprobs_from_logits`` of verl; online softmax of Milakov
    and Gimelshein (arXiv 1805.02867).

    Examples:
        >>> out = rlkernel.logprob(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), return_entropy=True)
        >>> out.logprobs, out.entropy
        (tensor([-0.4076]), tensor([0.8324]))
    """
    _validate.floating("logits", logits)
    logits, group, vocab_start = _vocab_parallel.local_logits(logits, group, vocab_start)
    group, first = _vocab_parallel.named(group, vocab_start)
    if logits.dim() == 0 or (logits.shape[-1] == 0 and group is None):
        raise ValueError(f"logits must be [..., V] with V >= 1, got {tuple(logits.shape)}")
    rows = logits.shape[:-1]
    target_ids = _validate.target_ids(target_ids, rows, "the rows of logits", logits.device)
    temperature = _validate.temperature(temperature, rows, logits.dtype, logits.device)
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.clone(memory_format=torch.contiguous_format)  # contiguous() lets strides of no row be
    if inplace_backward:
        _validate.apart("logits", logits, "inplace_backward=True")
    support = _support.checked(
        support_ids, support_offsets, target_ids.numel(), logits.shape[-1], logits.device
    )
    _vocab_parallel.no_support(support_ids, group)
    options = temperature, ignore_index, return_entropy, inplace_backward
    call = LogprobCall(logits, target_ids, *options, *(support or (None, None)))
    parts = _vocab_parallel.parts_of(group, first, logits.shape[-1], whole=support is not None)
    if group is not None or parts > 1:
        call = call._replace(group=group, vocab_start=first, parts=parts)
    return LogprobOutput(*op(call))


@typed
def selective_log_softmax(logits: Tensor, index: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities of the tokens ``index``: ``log_softmax(logits / T, -1).gather(-1, index)``, under
    TRL's name.

    ``index`` is [...] (one token a row) or [..., K] (K tokens a row); the result has its shape, in fp32.

    Examples:
        >>> rlkernel.selective_log_softmax(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0, 2]]))
        tensor([[-0.4076, -2.4076]])
    """
    _validate.floating("logits", logits)
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"index must be integers, got {_validate.name(index.dtype)}")
    if index.shape == logits.shape[:-1]:
        return logprob(logits, index, temperature=temperature).logprobs
    if index.dim() != logits.dim() or index.shape[:-1] != logits.shape[:-1]:
        want = tuple(logits.shape[:-1])
        raise ValueError(f"index must have shape {want} or {want} + (K,), got {tuple(index.shape)}")
    lse = logprob(logits, index.new_zeros(logits.shape[:-1]), temperature=temperature).lse
    inside = _validate.Range(0, logits.shape[-1] - 1, False, f"in [0, {logits.shape[-1]})")
    _validate.look("index", index.flatten(), inside.holds, inside.want)
    t = temperature[..., None] if isinstance(temperature, Tensor) and temperature.dim() else temperature
    return logits.gather(-1, index.long()).to(lse.dtype) / t - lse[..., None]


@typed
def logprobs_from_logits(logits: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities of ``labels``: ``logprob(logits, labels).logprobs``, under verl's and DeepSpeed-
    Chat's name.  ``temperature`` is a keyword, because verl's third argument is ``inplace_backward``.

    Examples:
        >>> rlkernel.logprobs_from_logits(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1]))
        tensor([-1.4076])
    """
    _validate.floating("logits", logits)
    labels = _validate.target_ids(labels, logits.shape[:-1], "the rows of logits", logits.device, "labels")
    return logprob(logits, labels, temperature=temperature).logprobs


@typed
def entropy_from_logits(logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Entropy of ``softmax(logits / T)`` in nats, fp32, [...]: the name that TRL and verl share.

    ``temperature`` is a keyword, because TRL's second argument is ``chunk_size``, which nothing here needs.

    Examples:
        >>> rlkernel.entropy_from_logits(torch.zeros(2, 8))
        tensor([2.0794, 2.0794])
    """
    no_target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropy = logprob(logits, no_target, temperature=temperature, return_entropy=True).entropy
    assert entropy is not None
    return entropy


def row_gradient(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """An upstream gradient as the kernels take it: dense, in the dtype of the statistics."""
    return None if grad is None else _validate.dense(grad, like.dtype)


def _forward(impl: ModuleType, call: LogprobCall) -> LogprobResults:
    vocab = call.logits.shape[-1]
    if call.group is None:
        _validate.values(call.target_ids, vocab, call.temperature, call.ignore_index)
    else:
        _vocab_parallel.check(call, vocab)
    if call.group is None and call.parts == 1:
        results = impl.forward(call)
    else:
        results = vocab_parallel.forward(impl, call, vocab)
    _validate.healthy("logits", results.lse)
    return results


def _backward(
    impl: ModuleType, call: LogprobCall, results: LogprobResults, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor]:
    upstream = RowGrads(*(row_gradient(g, results.row_max) for g in grads))
    if call.group is None:
        return impl.backward(call, results, upstream)
    return vocab_parallel.backward_logits(impl, call, results, upstream)


def _like(call: LogprobCall) -> LogprobResults:
    dtype = torch.promote_types(call.logits.dtype, torch.float32)
    row = functools.partial(torch.empty, call.target_ids.shape, dtype=dtype, device=call.logits.device)
    values = None if call.support_ids is None else call.logits.new_empty(call.support_ids.shape)
    return LogprobResults(row(), row() if call.return_entropy else None, row(), row(), row(), values)


op = Op(
    "logprob",
    LogprobCall,
    LogprobResults,
    outputs=3,
    pick=("logits", "target_ids"),
    forward=_forward,
    backward=_backward,
    like=_like,
    gradients=("logits",),
    differentiable=("logprobs", "entropy", "lse"),
    saves=(
        "logits", "target_ids", "temperature", "support_ids", "support_offsets",
        "entropy", "row_max", "log_sum", "values",
    ),
    saves_if={"logprobs": "support_ids"},
    overwrites="logits",
    in_node={"inplace_backward": False},
)  # fmt: skip
