"""Log-probability of given tokens, entropy and log-sum-exp, from logits."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.ops import _logprob_support, _support, _validate
from rlkernel.ops._typed import typed
from rlkernel.runtime.modes import once_differentiable
from rlkernel.types import LogprobOutput


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
    """
    _validate.floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [..., V] with V >= 1, got {tuple(logits.shape)}")
    rows = logits.shape[:-1]
    target_ids = _validate.target_ids(target_ids, rows, "the rows of logits", logits.device)
    temperature = _validate.temperature(temperature, rows, logits.dtype, logits.device)
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if inplace_backward and any(s == 0 and n > 1 for s, n in zip(logits.stride(), logits.shape, strict=True)):
        strides = logits.stride()
        raise ValueError(f"logits must not be expanded with inplace_backward=True, got strides {strides}")
    support = _support.checked(
        support_ids, support_offsets, target_ids.numel(), logits.shape[-1], logits.device
    )
    if support is not None:
        options = temperature, ignore_index, return_entropy, inplace_backward
        return _logprob_support.logprob(logits, target_ids, *options, *support)
    if torch.compiler.is_compiling():
        scalar, tensor = (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)
        logprobs, entropy, lse, _, _ = _op(logits, target_ids, tensor, scalar, ignore_index, return_entropy)
        return LogprobOutput(logprobs, entropy if return_entropy else None, lse)
    return LogprobOutput(
        *_Logprob.apply(logits, target_ids, temperature, ignore_index, return_entropy, inplace_backward)
    )


@typed
def selective_log_softmax(logits: Tensor, index: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities of the tokens ``index``: ``log_softmax(logits / T, -1).gather(-1, index)``, under
    TRL's name.

    ``index`` is [...] (one token a row) or [..., K] (K tokens a row); the result has its shape, in fp32.
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
    t = temperature[..., None] if isinstance(temperature, Tensor) and temperature.dim() else temperature
    return logits.gather(-1, index).to(lse.dtype) / t - lse[..., None]


@typed
def logprobs_from_logits(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities of ``labels``: ``logprob(logits, labels).logprobs``, under verl's and DeepSpeed-
    Chat's name."""
    _validate.floating("logits", logits)
    labels = _validate.target_ids(labels, logits.shape[:-1], "the rows of logits", logits.device, "labels")
    return logprob(logits, labels, temperature=temperature).logprobs


@typed
def entropy_from_logits(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Entropy of ``softmax(logits / T)`` in nats, fp32, [...]: the name that TRL and verl share."""
    no_target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropy = logprob(logits, no_target, temperature=temperature, return_entropy=True).entropy
    assert entropy is not None
    return entropy


def row_gradient(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """An upstream gradient as the kernels take it: dense, in the dtype of the statistics."""
    return None if grad is None else _validate.dense(grad, like.dtype)


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, logits, target_ids, temperature, ignore_index, return_entropy, inplace
    ):
        ctx.set_materialize_grads(False)
        # backward runs on the same backend, also on another thread or after the block that forced it
        ctx.impl = dispatch.pick("logprob", logits, target_ids)
        logprobs, entropy, lse, row_max, log_sum = _forward(
            ctx.impl, logits, target_ids, temperature, ignore_index, return_entropy
        )
        per_row = temperature if isinstance(temperature, Tensor) else None
        ctx.save_for_backward(logits, target_ids, per_row, entropy, row_max, log_sum)
        ctx.temperature = None if per_row is not None else temperature
        ctx.ignore_index, ctx.inplace, ctx.overwritten = ignore_index, inplace, False
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable("logprob")
    def backward(ctx: Any, grad_logprobs, grad_entropy, grad_lse):  # type: ignore[no-untyped-def]
        if ctx.overwritten:
            raise RuntimeError(
                "inplace_backward must be False for a second backward, got True: logits are gone"
            )
        logits, target_ids, per_row, entropy, row_max, log_sum = ctx.saved_tensors
        grads = (grad_logprobs, grad_entropy, grad_lse)
        if grad_logprobs is None and grad_entropy is None and grad_lse is None:
            return (None,) * 6
        temperature = per_row if per_row is not None else ctx.temperature
        if ctx.inplace:
            ctx.overwritten = True
            # other users of the logits in this graph then raise instead of computing nonsense
            torch.autograd.graph.increment_version(logits)
        grad = _backward(
            ctx.impl, grads, logits, target_ids, temperature, ctx.ignore_index, entropy, row_max, log_sum,
            ctx.inplace,
        )  # fmt: skip
        return grad, None, None, None, None, None


def _forward(
    impl: ModuleType,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    return_entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    _validate.values(target_ids, logits.shape[-1], temperature, ignore_index)
    stats = impl.forward(logits, target_ids, temperature, ignore_index, return_entropy)
    _validate.healthy("logits", stats[2])
    return stats


def _backward(
    impl: ModuleType,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    inplace: bool,
) -> Tensor:
    grad_logprobs, grad_entropy, grad_lse = (row_gradient(g, row_max) for g in grads)
    return impl.backward(
        grad_logprobs, grad_entropy, grad_lse, logits, target_ids, temperature, ignore_index, entropy,
        row_max, log_sum, inplace
    )  # fmt: skip


# Under torch.compile the op is one opaque node.  An absent entropy is an empty tensor, because a custom op's
# outputs are tensors; inplace_backward is a permission, which a functional graph does not use.


@torch.library.custom_op("rlkernel::logprob", mutates_args=())
def _op(
    logits: Tensor,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    ignore_index: int,
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    t = temperature if temperatures is None else temperatures
    impl = dispatch.pick("logprob", logits, target_ids)
    stats = _forward(impl, logits, target_ids, t, ignore_index, return_entropy)
    logprobs, entropy, lse, row_max, log_sum = stats
    return logprobs, logprobs.new_empty(0) if entropy is None else entropy, lse, row_max, log_sum


@_op.register_fake
def _op_fake(  # type: ignore[no-untyped-def]
    logits, target_ids, temperatures, temperature, ignore_index, return_entropy
):
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = [torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device) for _ in range(5)]
    if not return_entropy:
        rows[1] = rows[0].new_empty(0)
    return tuple(rows)


@torch.library.custom_op("rlkernel::logprob_backward", mutates_args=())
def _op_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    ignore_index: int,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
) -> Tensor:
    t = temperature if temperatures is None else temperatures
    grads = (grad_logprobs, grad_entropy, grad_lse)
    impl = dispatch.pick("logprob", logits, target_ids)
    return _backward(impl, grads, logits, target_ids, t, ignore_index, entropy, row_max, log_sum, False)


@_op_backward.register_fake
def _op_backward_fake(grad_logprobs, grad_entropy, grad_lse, logits, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target_ids, temperatures, temperature, ignore_index, return_entropy = inputs
    _, entropy, _, row_max, log_sum = output
    ctx.save_for_backward(logits, target_ids, temperatures, entropy, row_max, log_sum)
    ctx.temperature, ctx.ignore_index, ctx.return_entropy = temperature, ignore_index, return_entropy
    ctx.set_materialize_grads(False)


@once_differentiable("logprob")
def _autograd(ctx: Any, grad_logprobs, grad_entropy, grad_lse, *unused):  # type: ignore[no-untyped-def]
    logits, target_ids, temperatures, entropy, row_max, log_sum = ctx.saved_tensors
    if not ctx.return_entropy:
        grad_entropy = None
    grad = _op_backward(
        grad_logprobs, grad_entropy, grad_lse, logits, target_ids, temperatures, ctx.temperature,
        ctx.ignore_index,
        entropy if grad_entropy is not None else None, row_max, log_sum,
    )  # fmt: skip
    return grad, None, None, None, None, None


_op.register_autograd(_autograd, setup_context=_setup_context)
