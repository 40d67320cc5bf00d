"""The policy loss in plain PyTorch; its gradients are those of autograd."""

import math

import torch
from torch import Tensor

from rlkernel.calls import policy_loss as names
from rlkernel.calls.policy_loss import (
    PolicyLossCall,
    PolicyLossResults,
    PolicyRule,
    PolicySelectCall,
    PolicySelectResults,
)
from rlkernel.reference import differentiating
from rlkernel.reference import unsupported as unsupported
from rlkernel.reference.policy_loss_selection import covariance, hash_of, largest


def forward(call: PolicyLossCall) -> PolicyLossResults:
    rule, entropy_gradient = call.rule, call.entropy_gradient
    with differentiating(call) as call:
        rows = _Rows(call.logprobs, call.cu_seqlens)
        leaf = call.logprobs.detach().requires_grad_()
        bonus = None if call.entropy is None else call.entropy.detach().requires_grad_(entropy_gradient)
        total, metrics = _total(rows, call._replace(logprobs=leaf, entropy=bonus))
        total = total + leaf.sum() * 0 if not total.requires_grad else total
        leaves = [leaf] + ([bonus] if bonus is not None and entropy_gradient else [])
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    grads = tuple(torch.where(call.mask, g, 0) for g in grads)
    count = metrics["tokens" if names.SUMS[rule.aggregation] == "tokens" else "sequences"]
    below = torch.full_like(count, rule.denominator) if rule.denominator else count.clamp(min=1)
    scale = rule.factor / below
    values = torch.stack([*metrics.values()])
    return PolicyLossResults(
        total.detach() * scale, values, scale, grads[0], grads[1] if len(grads) > 1 else None
    )


def select(call: PolicySelectCall) -> PolicySelectResults:
    """One bool for each token: those that kl_cov and clip_cov pick, a share of the batch's.

    kl_cov picks the tokens with the largest covariance of log-probability and advantage, clip_cov those with
    the least hash of the ones whose covariance lies within bounds and whose ratio is not clipped.
    """
    logprobs, old_logprobs, advantages, mask, cu_seqlens, pick = call
    rows = _Rows(logprobs, cu_seqlens)
    advantages = rows.like(advantages, logprobs)
    tokens = mask.sum().double()
    cov = covariance(logprobs, advantages, mask, tokens)
    wanted = (tokens * pick.share).floor().clamp(min=1).long()
    if not pick.by_hash:
        return PolicySelectResults(largest(cov, mask & ~cov.isnan(), wanted, pick.share))
    old = logprobs if old_logprobs is None else old_logprobs
    r = (logprobs - old).exp()
    clipped = r * advantages > r.clamp(pick.low, pick.high) * advantages
    candidates = mask & (cov > pick.cov_low) & (cov < pick.cov_high) & ~clipped
    place = torch.arange(logprobs.shape[-1], device=logprobs.device)
    first = torch.zeros_like(place) if cu_seqlens is None else cu_seqlens[rows.of_token]
    position = (place - first).int().expand(logprobs.shape)
    return PolicySelectResults(largest(~hash_of(old, position, pick.seed), candidates, wanted, pick.share))


class _Rows:
    """Sums over sequences, padded or packed, and what a sequence has given back to its tokens."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None) -> None:
        self.count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        rows = torch.arange(self.count, device=like.device)
        if cu_seqlens is None:
            self.of_token = rows[:, None].expand(like.shape)
        else:
            self.of_token = rows.repeat_interleave(cu_seqlens.diff(), output_size=like.shape[0])

    def like(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x if x.shape == tokens.shape else self.spread(x)

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.count).index_add(0, self.of_token.reshape(-1), x.reshape(-1))

    def spread(self, x: Tensor) -> Tensor:
        return x[self.of_token]

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.sum(x) / self.sum(mask.to(x.dtype)).clamp(min=1)


def _total(rows: _Rows, call: PolicyLossCall) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, mask, rule = call.logprobs, call.mask, call.rule
    advantages = rows.like(call.advantages, logprobs)
    old_logprobs = logprobs.detach() if call.old_logprobs is None else call.old_logprobs
    # a token that the mask hides is replaced before it meets any arithmetic: 0 * inf is NaN
    advantages = torch.where(mask, advantages, 0)
    logp, old = torch.where(mask, logprobs, 0), torch.where(mask, old_logprobs, 0)
    # and so is one outside of its support, which yet stays in every count
    inside = mask & ~(logp.isneginf() | old.isneginf())
    weight, log_weight, kept = torch.ones_like(old), torch.zeros_like(old), torch.ones_like(mask)
    if rule.correction:
        weight, log_weight, kept = _correction(rows, call, logp.detach(), old, advantages)
        if rule.shrink:
            mask, inside = mask & kept, inside & kept
        weight = torch.where(kept, weight, 0)
    logp, old = torch.where(inside, logprobs, 0), torch.where(inside, old_logprobs, 0)
    advantages = torch.where(inside, advantages, 0)
    difference = logp - old

    level, term = names.LEVELS[rule.level], names.POLICY_TERMS[rule.term]
    log_ratio = difference
    if term == "gmpo":
        log_ratio = torch.where(
            advantages > 0,
            difference.clamp(max=rule.high),
            torch.where(advantages < 0, difference.clamp(min=rule.low), 0),
        )
    if level != "token":
        mean = rows.spread(rows.mean(log_ratio, mask))
        log_ratio = mean if level == "sequence" else log_ratio - log_ratio.detach() + mean.detach()
    ratio = _Exp.apply(log_ratio.clamp(-rule.log_clip, rule.log_clip))

    # of what is dropped below nothing comes back: an infinite derivative times 0 is NaN
    counted = kept if call.selected is None or term == "surrogate" else kept & ~call.selected
    own, live = _connected(counted, ratio), _connected(counted, logp)
    if term == "vespo":
        loss = _vespo(rows, rule, difference, advantages, live, log_weight, mask)
        low = high = far = torch.zeros_like(ratio)
    else:
        loss, low, high, far = _term(rule, own, advantages, live, old)
    if call.selected is not None:
        if term == "surrogate":
            loss = loss + torch.where(call.selected, rule.coefficient * difference.abs(), 0)
        else:
            loss = torch.where(call.selected, 0, loss)
        far = far + call.selected
    if rule.correction:
        loss = torch.where(kept, loss * weight, 0)
    kl, referred = torch.zeros_like(logp), inside
    if rule.kl:
        assert call.ref_logprobs is not None
        referred = inside & ~call.ref_logprobs.isneginf()
        weight_of_kl = _kl_weight(rule, ratio, logp, old, inside, call.rollout_logprobs)
        to_reference = torch.where(referred, logp - torch.where(referred, call.ref_logprobs, 0), 0)
        kl = _kl(rule, to_reference, torch.where(referred, weight_of_kl, 0))
        if rule.beta:  # 0 * inf is NaN: what has no weight is a metric
            loss = loss + rule.beta * kl
    bonus = torch.zeros_like(logp)
    if call.entropy is not None:
        bonus = torch.where(inside, call.entropy, 0)
        if rule.entropy_coef:
            loss = loss - rule.entropy_coef * bonus
    loss = torch.where(inside, loss, 0)
    by_row = rows.sum(loss)
    if names.SUMS[rule.aggregation] == "sequence_means":
        counts = call.token_counts
        by_row = rows.mean(loss, mask) if counts is None else by_row / _divisor(counts)

    tokens = mask.sum().to(logp.dtype)

    def mean_of(x: Tensor, where: Tensor = inside) -> Tensor:
        return torch.where(where, x, 0).sum() / tokens.clamp(min=1)

    with torch.no_grad():
        metrics = {
            "clip_fraction_low": mean_of(low),
            "clip_fraction_high": mean_of(high),
            "clip_fraction_far": mean_of(far),
            "approx_kl_k1": mean_of(-difference),
            "approx_kl_k3": mean_of(difference.expm1() - difference),
            "ratio_mean": mean_of(ratio),
            "ratio_max": torch.cat([torch.where(inside, ratio, 0).reshape(-1), ratio.new_zeros(1)]).max(),
            "entropy": mean_of(bonus),
            "kl_to_reference": mean_of(kl, referred),
            "correction_weight_mean": mean_of(weight, mask & kept),
            "correction_kept": mean_of(kept.to(logp.dtype), mask),
            "tokens": tokens,
            "sequences": (rows.sum(mask.to(logp.dtype)) > 0).sum().to(logp.dtype),
            "not_finite": (~loss.isfinite()).sum().to(logp.dtype),
            "outside_support": (mask & ~referred).sum().to(logp.dtype),
        }
    return by_row.sum(), metrics


class _Exp(torch.autograd.Function):
    """exp, whose derivative is 0 where nothing comes back through it, also where it is infinite."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return torch.where(grad == 0, 0, grad * y)


class _Of(torch.autograd.Function):
    """One tensor's value with the gradient of another: to add their difference would round it."""

    @staticmethod
    def forward(ctx, x, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


def _connected(where: Tensor, x: Tensor) -> Tensor:
    """``x``, which has a gradient where ``where`` is true."""
    return torch.where(where, x, x.detach())


def _term(
    rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of each token, and whether it is clipped below, above or far beyond."""
    term = names.POLICY_TERMS[rule.term]
    low = high = far = torch.zeros_like(ratio)
    if term == "clipped":
        plain = -ratio.clamp(max=rule.delta) * advantages
        bounded = -ratio.clamp(rule.low, rule.high) * advantages
        loss, negative = torch.maximum(plain, bounded), advantages < 0
        limit = torch.where(negative, -advantages * rule.dual, torch.inf)
        far = negative & ((loss > limit) | (ratio > rule.delta))
        low, high = negative & (ratio < rule.low), (advantages > 0) & (ratio > rule.high)
        loss = torch.minimum(loss, limit)
    elif term == "cispo":
        loss = -ratio.clamp(rule.low, rule.high).detach() * advantages * logp
        low, high = ratio < rule.low, ratio > rule.high
    elif term == "cispo_mask":
        low, high = ratio <= rule.low, ratio >= rule.high
        loss = -torch.where(low | high, 0, ratio).detach() * advantages * logp
    elif term == "reinforce":
        loss = -advantages * logp
    elif term == "sapo":
        tau = _either(advantages > 0, rule.tau_positive, rule.tau_negative, ratio)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif term == "gmpo":
        loss, difference = -ratio * advantages, logp - old
        low, high = (advantages < 0) & (difference < rule.low), (advantages > 0) & (difference > rule.high)
    elif term == "dppo":
        low, high = _moved_too_far(rule.divergence, rule.low, rule.high, advantages, logp.detach(), old)
        advantages = torch.where(low | high, 0, advantages)  # which may be infinite
        loss, far = -ratio.clamp(max=rule.dual).detach() * advantages * logp, ratio > rule.dual
    elif term == "surrogate":
        loss = -ratio * advantages
    else:
        loss = -(logp * advantages - rule.coefficient / 2 * (logp - old) ** 2)  # dro
    return loss, low, high, far


def _either(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """One of two numbers, in the dtype of ``like``; torch.where has two of Python's in fp32."""
    return torch.where(condition, like.new_full((), first), second)


def _vespo(
    rows: "_Rows", rule: PolicyRule, difference: Tensor, advantages: Tensor, logp: Tensor, log_weight: Tensor,
    mask: Tensor,
) -> Tensor:  # fmt: skip
    """-stop(phi) A logp, phi = exp(lambda + k log w - lambda w) at the sequence's whole ratio w."""
    log_w = rows.sum(torch.where(mask, difference.detach().clamp(-20, 20), 0))
    if names.CORRECTION_LEVELS[rule.correction] == "token":
        log_w = log_w + rows.sum(torch.where(mask, log_weight.clamp(math.log(1e-8), 20), 0))
    elif rule.correction:
        log_w = log_w + rows.mean(torch.where(mask, log_weight.clamp(math.log(1e-8), 20), 0), mask)
    log_w = rows.spread(log_w.clamp(math.log(1e-8), 20))
    k = _either(advantages >= 0, rule.k_positive, rule.k_negative, logp)
    rate = _either(advantages >= 0, rule.lambda_positive, rule.lambda_negative, logp)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -torch.where(phi.isfinite(), phi, 0) * advantages * logp


def _moved_too_far(
    divergence: int, low: float, high: float, advantages: Tensor, logp: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor]:
    """Where a probability fell, or rose, further from its anchor's than allowed, with the advantage."""
    p, q = logp.exp(), anchor.exp()
    change = p - q
    if names.DIVERGENCES[divergence] == "kl":  # 1 - p by expm1: it cancels where p is near 1
        not_p, not_q = (-torch.expm1(x).clamp(max=0) for x in (logp, anchor))
        kl = q * (anchor - logp) + not_q * ((not_q + 1e-8) / (not_p + 1e-8)).log()
        change = torch.where(p > q, kl, torch.where(p < q, -kl, 0))
    return (advantages <= 0) & (change < low), (advantages > 0) & (change > high)


def _kl_weight(
    rule: PolicyRule, ratio: Tensor, logp: Tensor, old: Tensor, mask: Tensor, rollout: Tensor | None
) -> Tensor:
    kind = names.KL_WEIGHTS[rule.kl_weight]
    if kind == "token":
        return (logp - old).exp()
    if kind == "score":
        return (logp - logp.detach()).exp()
    if kind == "rollout":
        assert rollout is not None
        d = logp - torch.where(mask, rollout, 0)
        known = d.detach().exp().isfinite()  # before the exponential: its gradient of infinity is NaN
        return torch.where(known, torch.where(known, d, 0).exp(), 0)
    return ratio if kind == "ratio" else torch.ones_like(ratio)


def _divisor(counts: Tensor) -> Tensor:
    """At least 1; NaN for what is no count, where nobody could look."""
    return torch.where((counts >= 0) & (counts < math.inf), counts.clamp(min=1), math.nan)


def _kl(rule: PolicyRule, d: Tensor, weight: Tensor) -> Tensor:
    """The estimate times its weight; neither has a gradient where a bound holds."""
    bounded = d.clamp(-rule.kl_input, rule.kl_input)
    whole = (_estimate(rule, bounded) * weight).detach()
    shut = (d.abs() > rule.kl_input) | (whole.abs() > rule.kl_output)
    # selected before they meet any arithmetic: the gradient of an infinite estimate is NaN, also times 0
    weight = torch.where(shut, weight.detach(), weight)
    value = _estimate(rule, torch.where(shut, 0, d)) * weight
    if rule.kl_gradient_of_k2:
        value = _estimate(rule, torch.where(shut, 0, d.detach())) * weight + d * d / 2 * weight.detach()
    return _Of.apply(value, whole.clamp(-rule.kl_output, rule.kl_output))


def _estimate(rule: PolicyRule, d: Tensor) -> Tensor:
    return {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": torch.expm1(-d) + d}[names.KL_ESTIMATORS[rule.kl]]


def _correction(
    rows: "_Rows", call: PolicyLossCall, logp: Tensor, old: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, its logarithm as vespo takes it, and which tokens are kept."""
    rule, mask, staleness = call.rule, call.mask, call.staleness
    assert call.rollout_logprobs is not None
    rollout = torch.where(mask, call.rollout_logprobs, 0)
    if staleness is not None:
        staleness = torch.where(mask, rows.like(staleness, old), 0)
    level, mode = names.CORRECTION_LEVELS[rule.correction], names.CORRECTION_MODES[rule.verdict]
    # else the engine had no logprob for the token, or the old policy does not know it
    scored = ~(rollout.isnan() | rollout.isneginf() | old.isneginf())
    known = scored & ~logp.isneginf()
    d = torch.where(scored, old - rollout, 0)
    log_weight = d if level == "token" else torch.zeros_like(d)
    if level in ("sequence", "geometric"):
        log_weight = rows.spread(rows.sum(d) if level == "sequence" else rows.mean(d, mask))
    if rule.stale_only:
        assert staleness is not None
        log_weight = torch.where(staleness > 0, log_weight, 0)
    inside = (log_weight >= rule.log_weight_low) & (log_weight <= rule.log_weight_high)
    weight = log_weight.exp().clamp(rule.weight_low, rule.weight_high)
    log_weight = log_weight.clamp(rule.log_weight_low, rule.log_weight_high)
    if mode == "mask":
        weight, log_weight = torch.where(inside, weight, 0), torch.where(inside, log_weight, -torch.inf)
    kept = inside if mode == "mask" else torch.ones_like(inside)
    if names.POLICY_TERMS[rule.term] == "vespo":  # it takes the weight into its own
        weight, kept = torch.ones_like(weight), torch.ones_like(kept)
    if staleness is not None:
        weight = weight * (staleness * rule.log_decay).exp()
    if rule.normalize:
        present = torch.where(mask, weight, 0)
        by_token = level in ("token", "none")
        count = (mask if by_token else rows.sum(mask.to(d.dtype)) > 0).sum()
        total = present.sum() if by_token else rows.mean(present, mask).sum()
        mean = total / count.clamp(min=1)
        weight = weight / torch.where(mean > 1e-8, mean, 1)

    kept = kept & ~((d < rule.token_low) | (d > rule.token_high))
    outside = (d < rule.extreme_low) | (d > rule.extreme_high)
    rejected = rows.sum((mask & outside).to(d.dtype)) > 0
    x = d.clamp(-20, 20)
    for k, stat in (("k1", x), ("k2", x * x / 2), ("k3", x.expm1() - x)):
        stat = torch.where(mask, stat, 0)
        for name, value in (("sum", rows.sum(stat)), ("mean", rows.mean(stat, mask))):
            rejected |= value > getattr(rule, f"{name}_{k}_high")
            rejected |= value < getattr(rule, f"{name}_{k}_low", -torch.inf)
    kept = kept & ~rows.spread(rejected)
    if rule.off_policy_high < torch.inf:
        drifted = rows.spread(rows.mean(torch.where(mask & known, rollout - logp, 0), mask))
        kept = kept & ~((advantages < 0) & (drifted > rule.off_policy_high))
    if rule.tv_high < torch.inf:
        far = rows.spread(rows.mean(torch.where(mask, x.expm1().abs(), 0), mask)) > rule.tv_high
        kept = kept & ~(far & (d * advantages > 0))
    if rule.sign_mask:
        bounds = rule.sign_mask, rule.sign_low, rule.sign_high
        low, high = _moved_too_far(*bounds, advantages, logp, rollout)
        if rule.two_sided:
            one = torch.ones_like(advantages)
            low = _moved_too_far(*bounds, -one, logp, rollout)[0]
            high = _moved_too_far(*bounds, one, logp, rollout)[1]
        kept = kept & ~(known & (low | high))
    if staleness is not None:
        kept = kept & ~(staleness > rule.max_staleness)
    return weight, log_weight, kept


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    drift: float = 0.2,
    per_token: bool = True,
    extras: bool = False,
    bias: float = 0.0,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.policy_loss`` for ``shape`` [B, L]: sequences of all lengths with gaps
    where a tool spoke; with ``extras`` also reference, rollout and entropy."""
    g = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64, device="cpu")

    old = -noise(*shape).abs()
    lengths = torch.randint(1, shape[-1] + 1, shape[:-1], generator=g, device="cpu")
    mask = (torch.arange(shape[-1], device="cpu") < lengths[..., None]) & (
        torch.rand(shape, generator=g, dtype=torch.float32, device="cpu") > 0.1
    )
    tensors = {
        "logprobs": old + drift * noise(*shape),
        "old_logprobs": old,
        "advantages": bias + (noise(*shape) if per_token else noise(*shape[:-1])),
    }
    if extras:
        tensors |= {
            "ref_logprobs": old + drift * noise(*shape),
            "rollout_logprobs": old + drift * noise(*shape),
            "entropy": noise(*shape).abs(),
        }
    tensors = {name: x.to(dtype).to(device) for name, x in tensors.items()}
    return tensors | {"mask": mask.to(device)}
