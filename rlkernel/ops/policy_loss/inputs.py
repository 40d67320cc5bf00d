"""The tensors of a policy loss: what they must be, and how backends take them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.policy_loss import (
    KL_WEIGHTS,
    PolicyRule,
)
from rlkernel.ops import _packing, _validate
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection, of_second_moment
from rlkernel.runtime import debug


def checked(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    choices: Mapping[str, Any],
    *,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    staleness: Tensor | None,
    entropy: Tensor | None,
    entropy_coef: float,
    num_items_in_batch: float | Tensor | None,
    token_counts: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, tuple[Any, ...], PolicyRule, Tensor | None]:
    """``(entropy, tensors, rule, items)`` as backends take them, ``tensors`` from ``old_logprobs`` to
    ``token_counts``; ``choices`` are those of ``policy_rule.build``.  Raises ValueError for an argument that
    is off."""
    _validate.floating("logprobs", logprobs)
    if not isinstance(choices["loss_agg_mode"], str):  # an array would be compared element by element
        policy_rule.choice("loss_agg_mode", choices["loss_agg_mode"], policy_rule.AGGREGATIONS)
    if cu_seqlens is None and logprobs.dim() != 2:
        want = "[B, L], or [N] with cu_seqlens"
        raise ValueError(f"logprobs must be {want}, got shape {tuple(logprobs.shape)}")
    if cu_seqlens is not None:
        if logprobs.dim() != 1:
            raise ValueError(f"logprobs must be [N] with cu_seqlens, got shape {tuple(logprobs.shape)}")
        cu_seqlens = _packing.offsets("cu_seqlens", cu_seqlens, "logprobs", logprobs.device)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    count = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    old_logprobs = _tokens("old_logprobs", old_logprobs, logprobs, dtype)
    ref_logprobs = _tokens("ref_logprobs", ref_logprobs, logprobs, dtype)
    rollout_logprobs = _tokens("rollout_logprobs", rollout_logprobs, logprobs, dtype)
    entropy = _tokens("entropy", entropy, logprobs, dtype)
    advantages, each = _advantages(advantages, logprobs, count, dtype)
    mask = _mask(mask, logprobs)
    staleness, stale_each = _staleness(staleness, logprobs, count, dtype)
    if token_counts is not None:
        token_counts = _token_counts(token_counts, logprobs, count, dtype)
    if cu_seqlens is not None:
        _packing.check(cu_seqlens, len(logprobs))
        # one more sequence also where their number would not tell what belongs to a token from what to one
        if (
            (each or stale_each)
            and count == len(logprobs)
            or _packing.may_be_padded(cu_seqlens, len(logprobs))
        ):
            cu_seqlens, mask = _packing.with_padding(cu_seqlens, mask, logprobs)
            advantages = _packing.one_more(advantages) if each else advantages
            staleness = _packing.one_more(staleness) if staleness is not None and stale_each else staleness
            token_counts = None if token_counts is None else _packing.one_more(token_counts)
    items = known = None
    if num_items_in_batch is not None:
        items, known = _validate.item_count("num_items_in_batch", num_items_in_batch, logprobs.device)
    if items is not None:
        known, items = 1.0, None if choices["loss_agg_mode"] == "token-sum" else items.to(dtype)
    rule = policy_rule.build(
        **choices,
        has_reference=ref_logprobs is not None,
        has_rollout=rollout_logprobs is not None and old_logprobs is not None,
        has_rollout_logprobs=rollout_logprobs is not None,
        has_staleness=staleness is not None,
        has_token_counts=token_counts is not None,
        entropy_coef=entropy_coef,
        num_items_in_batch=known,
        length=_length(logprobs, choices["loss_agg_mode"]) if cu_seqlens is None else None,
    )
    weighs_kl = KL_WEIGHTS[rule.kl_weight] == "rollout"
    if rollout_logprobs is not None and not rule.correction and not weighs_kl:
        raise ValueError("correction must be given with rollout_logprobs, got None")
    if entropy_coef and entropy is None:
        raise ValueError(f"entropy must be given with entropy_coef = {entropy_coef}, got None")
    tensors = (
        old_logprobs, advantages, mask, cu_seqlens, ref_logprobs if rule.kl else None, rollout_logprobs,
        staleness if rule.correction else None, token_counts,
    )  # fmt: skip
    return entropy, tensors, rule, items


def counted(tensors: tuple[Any, ...], correction: RolloutCorrection | str) -> tuple[Any, ...]:
    """The tensors with the mask of those tokens that ``m2_threshold`` leaves."""
    old_logprobs, advantages, mask, offsets, ref_logprobs, rollout_logprobs, *others = tensors
    mask = of_second_moment(correction, old_logprobs, rollout_logprobs, mask)
    return old_logprobs, advantages, mask, offsets, ref_logprobs, rollout_logprobs, *others


def check_values(
    advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None, token_counts: Tensor | None = None
) -> None:
    """Looks at the values themselves: offsets and counts on a CPU, and on a GPU in debug mode; NaN in debug
    mode."""
    if cu_seqlens is not None:
        _packing.check(cu_seqlens, mask.shape[0])
    if token_counts is not None:
        _check_counts(token_counts, mask, cu_seqlens)
    if debug.enabled() and debug.may_read(advantages):
        counted = advantages[mask] if advantages.shape == mask.shape else advantages
        if bool(counted.isnan().any()):
            raise ValueError("advantages must be numbers where the mask is true, got NaN")


def _check_counts(counts: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """At least one token where the sequence has one; a prompt whose samples have none has 0."""
    if not debug.may_read(counts) or not counts.numel():
        return
    low, high = (x.item() for x in counts.aminmax())
    if low >= 1 and high < math.inf:  # as almost always; NaN is neither
        return
    if cu_seqlens is None:
        own = mask.sum(-1)
    else:
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        own = before[cu_seqlens].diff()
    bad = ~((counts >= 1) & (counts < math.inf)) & ~((counts == 0) & (own == 0))
    if bad.any():
        i = int(bad.nonzero()[0])
        want = ">= 1 and finite" if own[i] else "0 or >= 1, and finite"
        raise ValueError(f"token_counts[{i}] must be {want}, got {counts[i].item()}")


def _length(logprobs: Tensor, loss_agg_mode: str) -> int:
    """What the rule depends on: not the length, unless the loss is divided by it."""
    return logprobs.shape[1] if loss_agg_mode == "seq-mean-token-sum-norm" else 0


def _tokens(name: str, x: Tensor | None, logprobs: Tensor, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    _validate.floating(name, x)
    if x.shape != logprobs.shape:
        raise ValueError(f"{name} must have logprobs' shape {tuple(logprobs.shape)}, got {tuple(x.shape)}")
    _validate.same_device(name, x, "logprobs", logprobs.device)
    if name != "entropy" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, got requires_grad=True")
    return _validate.dense(x, dtype)


def _advantages(x: Tensor, logprobs: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    _validate.floating("advantages", x)
    x, each = _per_sequence("advantages", x, logprobs, count)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("advantages must not require a gradient, got requires_grad=True")
    return _validate.dense(x, dtype), each


def _staleness(
    x: Tensor | None, logprobs: Tensor, count: int, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    if x is None:
        return None, False
    if not isinstance(x, Tensor):
        raise ValueError(f"staleness must be a tensor, got {type(x).__name__}")
    x, each = _per_sequence("staleness", x, logprobs, count)
    return _validate.dense(x, dtype), each


def _token_counts(x: Tensor, logprobs: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != (count,):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"token_counts must be one number for each of {count} sequences, got {got}")
    _validate.same_device("token_counts", x, "logprobs", logprobs.device)
    if x.is_complex():
        raise ValueError(f"token_counts must be real numbers, got {str(x.dtype).removeprefix('torch.')}")
    return _validate.dense(x, dtype)


def _per_sequence(name: str, x: Tensor, logprobs: Tensor, count: int) -> tuple[Tensor, bool]:
    """One value for each token, or [count], and whether it is that."""
    x, each = _packing.per_sequence(name, x, "logprobs", logprobs, count)
    _validate.same_device(name, x, "logprobs", logprobs.device)
    return x, each


def _mask(x: Tensor, logprobs: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"mask must be a tensor, got {type(x).__name__}")
    if x.shape != logprobs.shape:
        raise ValueError(f"mask must have logprobs' shape {tuple(logprobs.shape)}, got {tuple(x.shape)}")
    _validate.same_device("mask", x, "logprobs", logprobs.device)
    return (x if x.dtype == torch.bool else x != 0).contiguous()
