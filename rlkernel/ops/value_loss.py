"""The value function's loss: clipped squared or Huber error, aggregated over tokens and sequences."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.value_loss import VALUE_METRICS, ValueLossCall, ValueLossOutput, ValueLossResults
from rlkernel.opaque import Op
from rlkernel.ops import _packing, _validate
from rlkernel.ops._typed import typed
from rlkernel.runtime import debug
from rlkernel.types import LossAggMode, ValueLoss

# loss_agg_mode: the unit that is summed
UNITS = {
    "token-mean": "token",
    "token-sum": "token",
    "seq-mean-token-sum": "sum",
    "seq-mean-token-sum-norm": "sum",
    "seq-mean-token-mean": "mean",
}
LOSSES = ("mse", "huber")


@typed
def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    cliprange_value: float | None = None,
    loss: ValueLoss = "mse",
    huber_delta: float = 1.0,
    loss_agg_mode: LossAggMode = "token-mean",
    num_items_in_batch: float | Tensor | None = None,
    dp_size: int = 1,
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> ValueLossOutput:
    """PPO's value loss over the tokens of ``mask``, in one pass that also writes its gradient.

    Equal to, with ``l(d) = d**2 / 2`` (mse) or Huber's ``delta * (|d| - delta / 2)`` beyond ``delta``,

        clipped = clamp(values, old_values - cliprange_value, old_values + cliprange_value)
        losses = max(l(values - returns), l(clipped - returns))

    aggregated by ``loss_agg_mode``; without ``old_values``, ``l(values - returns)``.  The gradient is
    ``l'(values - returns)`` where the first of the two is the larger or both are equal, else 0.

    The same call gives the same bits (run-to-run), gradient included; a sequence's sum and gradient do not
    depend on the others (batch-invariant).

    Args:
        values: [B, L], or packed [N] with ``cu_seqlens``; fp16, bf16, fp32 or fp64.
        returns: as ``values``; no gradient.
        mask: as ``values``, bool or numbers: tokens where it is not 0 count, whatever the others hold.
        old_values: as ``values``: those of the rollout; no gradient.
        cliprange_value: how far a value may move from its old one, >= 0; with ``old_values`` only.
        loss: ``"mse"`` or ``"huber"``.
        huber_delta: where Huber's loss becomes linear, > 0.
        loss_agg_mode: ``"token-mean"``, ``"token-sum"``, ``"seq-mean-token-sum"``,
            ``"seq-mean-token-sum-norm"`` or ``"seq-mean-token-mean"``.  Sequences without a token do not
            count.
        num_items_in_batch: what the means divide by: tokens in ``"token-mean"``, sequences in ``"seq-*"``,
            of the whole batch where this call sees a part; a number or a tensor of one.  None: those of this
            call.  > 0; ``"token-sum"`` divides by nothing.
        dp_size: ranks whose gradients are averaged afterwards; multiplies the loss.
        loss_scale_factor: what ``"seq-mean-token-sum-norm"`` also divides by; None: L.  Must be given for
            packed input, which has no L.
        cu_seqlens: [S + 1] int32 or int64, where each packed sequence begins and the last one ends; tokens
            behind that are padding.

    Returns:
        ValueLossOutput: ``loss`` [] and ``metrics`` [9], fp32 (fp64 for fp64 values).  Without a token that
        counts, the loss is 0 and connected to the graph.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  Values of ``cu_seqlens``
            and ``num_items_in_batch`` are looked at on a CPU, and on a GPU only in debug mode
            (``RLKERNEL_DEBUG=1``), because that synchronises; else a number of items that is not > 0 makes
            the loss NaN.  NaN and infinities that count raise in debug
            mode, else show in the loss and in the metric ``nonfinite``.

    Follows ``compute_value_loss`` of verl and ``ppo_critic_loss_fn`` of AReaL.

    Examples:
        >>> values, returns = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])
        >>> rlkernel.value_loss(values, returns, torch.ones(1, 2)).loss
        tensor(0.2500)
    """
    _check_tensors(values, returns, mask, old_values, cu_seqlens)
    _validate.choice("loss", loss, LOSSES)
    _validate.choice("loss_agg_mode", loss_agg_mode, UNITS)
    if (old_values is None) != (cliprange_value is None):
        pair = ("old_values", "cliprange_value") if old_values is None else ("cliprange_value", "old_values")
        raise ValueError("{} must be given with {}, got None".format(*pair))
    cliprange = 0.0 if cliprange_value is None else _validate.number("cliprange_value", cliprange_value, 0.0)
    huber_delta = _validate.number("huber_delta", huber_delta, 0.0, above=True)
    _validate.at_least_one("dp_size", dp_size)
    dtype = torch.promote_types(values.dtype, torch.float32)
    items = _num_items(num_items_in_batch, loss_agg_mode, dp_size, dtype, values.device)
    factor = float(dp_size)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None and cu_seqlens is not None:
            raise ValueError(
                f"loss_scale_factor must be given with cu_seqlens and {loss_agg_mode!r}, got None"
            )
        scale = max(values.shape[-1], 1) if loss_scale_factor is None else loss_scale_factor
        factor /= _validate.number("loss_scale_factor", scale, 0.0, above=True)
    # the kernels take one dtype, or fp32 beside the values'
    alike = returns.dtype == values.dtype and (old_values is None or old_values.dtype == values.dtype)
    other = values.dtype if alike else dtype
    call = ValueLossCall(
        values=_validate.rows(values, values.dtype), returns=_validate.rows(returns, other),
        mask=_validate.rows(_validate.nonzero("mask", mask), torch.bool),
        old_values=None if old_values is None else _validate.rows(old_values, other),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(), num_items=items,
        cliprange=cliprange, huber_delta=huber_delta if loss == "huber" else None, unit=UNITS[loss_agg_mode],
        factor=factor, dtype=values.dtype, slopes=torch.is_grad_enabled() and values.requires_grad,
    )  # fmt: skip
    return ValueLossOutput(*op(call))


def _check_tensors(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    _validate.floating("values", values)
    _packing.form("values", values, cu_seqlens, "[B, L], or [N] with cu_seqlens")
    for name, x in (("returns", returns), ("old_values", old_values), ("mask", mask)):
        if x is None:
            continue
        if name != "mask":
            _validate.floating(name, x)
        _validate.is_tensor(name, x)
        _validate.like(name, x, "values", values)
        _validate.without_gradient(name, x)
    if cu_seqlens is not None:
        _packing.typed("cu_seqlens", cu_seqlens, "values", values.device)


def _num_items(
    value: float | Tensor | None, mode: str, dp_size: int, dtype: torch.dtype, device: torch.device
) -> float | Tensor | None:
    items, number = _validate.item_count("num_items_in_batch", value, device)
    if mode == "token-sum":
        return 1.0
    if value is None and dp_size > 1:
        raise ValueError(f"num_items_in_batch must be given with dp_size > 1 and {mode!r}, got None")
    return number if items is None else items.to(dtype)


def _forward(impl: ModuleType, call: ValueLossCall) -> ValueLossResults:
    values, mask = call.values, call.mask
    _packing.check(call.cu_seqlens, values.shape[0])
    results = impl.forward(call)
    if debug.enabled() and debug.may_read(values):
        bad = results.metrics[VALUE_METRICS.index("nonfinite")] > 0 or not results.loss.isfinite()
        for name, x in (("values", values), ("returns", call.returns), ("old_values", call.old_values)):
            if bad and x is not None and (wrong := mask & ~x.isfinite()).any():
                where = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"{name}{where} must be finite where mask is true, got {x[tuple(where)].item()}"
                )
    return results


def _like(call: ValueLossCall) -> ValueLossResults:
    values, cu_seqlens = call.values, call.cu_seqlens
    dtype = torch.promote_types(values.dtype, torch.float32)
    empty = functools.partial(torch.empty, dtype=dtype, device=values.device)
    sequences = values.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slope = empty(values.shape) if call.slopes else None
    return ValueLossResults(empty(()), empty(len(VALUE_METRICS)), slope, empty(sequences))


op = Op(
    "value_loss",
    ValueLossCall,
    ValueLossResults,
    outputs=2,
    pick=("values",),
    forward=_forward,
    backward=lambda impl, call, results, grads: impl.backward(call, results, grads[0]),
    like=_like,
    gradients=("values",),
    differentiable=("loss",),
    saves=("cu_seqlens", "slope", "scale"),
)
