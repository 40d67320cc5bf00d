"""The tensors of a policy loss: what they must be, and how backends take them."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.policy_loss import KL_WEIGHTS, PolicyLossCall
from rlkernel.ops import _packing, _validate
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.runtime import debug

_OF_SELECTION = {"cov_ratio", "clip_cov_lb", "clip_cov_ub", "seed"}  # which the rule does not know


def checked(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    staleness: Tensor | None,
    token_counts: Tensor | None,
    num_items_in_batch: float | Tensor | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> tuple[PolicyLossCall, Tensor | None]:
    """The call as backends take it, and what the loss is divided by where that is a tensor; ``options`` are
    the others of ``policy_loss``.  Raises ValueError for an argument that is off."""
    _validate.floating("logprobs", logprobs)
    mode = options["loss_agg_mode"]
    if not isinstance(mode, str):  # an array would be compared element by element
        policy_rule.choice("loss_agg_mode", mode, policy_rule.AGGREGATIONS)
    cu_seqlens, count = _packing.sequences("logprobs", logprobs, "[B, L]", cu_seqlens)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    old_logprobs = _tokens("old_logprobs", old_logprobs, logprobs, dtype)
    ref_logprobs = _tokens("ref_logprobs", ref_logprobs, logprobs, dtype)
    rollout_logprobs = _tokens("rollout_logprobs", rollout_logprobs, logprobs, dtype)
    entropy = _tokens("entropy", entropy, logprobs, dtype)
    _validate.floating("advantages", advantages)
    advantages, each = _tokens_or_sequences("advantages", advantages, logprobs, count)
    _validate.without_gradient("advantages", advantages)
    mask = _validate.flags("mask", mask, "logprobs", logprobs)
    stale_each = False
    if staleness is not None:
        _validate.is_tensor("staleness", staleness)
        if staleness.is_complex():
            raise ValueError(f"staleness must be real numbers, got {_validate.name(staleness.dtype)}")
        _validate.without_gradient("staleness", staleness)
        staleness, stale_each = _tokens_or_sequences("staleness", staleness, logprobs, count)
        staleness = _validate.dense(staleness, dtype)
    if token_counts is not None:
        token_counts = _token_counts(token_counts, logprobs, count, dtype)
    if cu_seqlens is not None:
        total = len(logprobs)
        last = _packing.check(cu_seqlens, total)
        # the padding is one more sequence; another one, where their number would not tell what belongs to a
        # token from what to a sequence
        more = int(last != total)
        for _ in range(more + int((each or stale_each) and count + more == total)):
            cu_seqlens, mask = _packing.with_padding(cu_seqlens, mask, logprobs)
            advantages = _packing.one_more(advantages) if each else advantages
            staleness = _packing.one_more(staleness) if staleness is not None and stale_each else staleness
            token_counts = None if token_counts is None else _packing.one_more(token_counts)
    items = known = None
    if num_items_in_batch is not None:
        items, known = _validate.item_count("num_items_in_batch", num_items_in_batch, logprobs.device)
    if items is not None:
        known, items = 1.0, None if mode == "token-sum" else items.to(dtype)
    # the rule depends on the length only where the loss is divided by it
    length = logprobs.shape[-1] if mode == "seq-mean-token-sum-norm" else 0
    rule = policy_rule.build(
        **{name: x for name, x in options.items() if name not in _OF_SELECTION},
        has_reference=ref_logprobs is not None,
        has_rollout=rollout_logprobs is not None and old_logprobs is not None,
        has_rollout_logprobs=rollout_logprobs is not None,
        has_staleness=staleness is not None,
        has_token_counts=token_counts is not None,
        num_items_in_batch=known,
        length=length if cu_seqlens is None else None,
    )
    weighs_kl = KL_WEIGHTS[rule.kl_weight] == "rollout"
    if rollout_logprobs is not None and not rule.correction and not weighs_kl:
        raise ValueError("correction must be given with rollout_logprobs, got None")
    if entropy is None and rule.entropy_coef:
        raise ValueError(f"entropy must be given with entropy_coef = {options['entropy_coef']}, got None")
    of_entropy = entropy is not None and rule.entropy_coef != 0 and entropy.requires_grad
    call = PolicyLossCall(
        logprobs=_validate.dense(logprobs, dtype),
        entropy=entropy,
        old_logprobs=old_logprobs,
        advantages=_validate.dense(advantages, dtype),
        mask=mask,
        cu_seqlens=cu_seqlens,
        ref_logprobs=ref_logprobs if rule.kl else None,
        rollout_logprobs=rollout_logprobs,
        staleness=staleness if rule.correction else None,
        token_counts=token_counts,
        selected=None,
        rule=rule,
        entropy_gradient=of_entropy and torch.is_grad_enabled(),
    )
    return call, items


def check_values(call: PolicyLossCall) -> None:
    """Looks at the values themselves: offsets and counts on a CPU, and on a GPU in debug mode; NaN in debug
    mode."""
    advantages, mask = call.advantages, call.mask
    _packing.check(call.cu_seqlens, mask.shape[0])
    if call.token_counts is not None:
        _check_counts(call.token_counts, mask, call.cu_seqlens)
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


def _tokens(name: str, x: Tensor | None, logprobs: Tensor, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    _validate.floating(name, x)
    _validate.like(name, x, "logprobs", logprobs)
    if name != "entropy":
        _validate.without_gradient(name, x)
    return _validate.dense(x, dtype)


def _tokens_or_sequences(name: str, x: Tensor, logprobs: Tensor, count: int) -> tuple[Tensor, bool]:
    """One value for each token, or [count], and whether it is that."""
    x, each = _packing.per_sequence(name, x, "logprobs", logprobs, count)
    _validate.same_device(name, x, "logprobs", logprobs.device)
    return x, each


def _token_counts(x: Tensor, logprobs: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != (count,):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"token_counts must be one number for each of {count} sequences, got {got}")
    _validate.same_device("token_counts", x, "logprobs", logprobs.device)
    if x.is_complex():
        raise ValueError(f"token_counts must be real numbers, got {_validate.name(x.dtype)}")
    _validate.without_gradient("token_counts", x)
    return _validate.dense(x, dtype)
