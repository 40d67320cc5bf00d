"""The policy loss in plain PyTorch; its gradients are those of autograd."""

import torch
from torch import Tensor

from rlkernel.types import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    KL_ESTIMATORS,
    LEVELS,
    POLICY_TERMS,
    SUMS,
    PolicyRule,
)


def unsupported(*tensors: Tensor, **options: object) -> list[str]:
    return []


def forward(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    entropy: Tensor | None,
    rule: PolicyRule,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(values, grad_logprobs, grad_entropy)``: the loss, the scale that the gradients still lack and the
    metrics in one tensor; d (loss / scale) / d logprobs, and / d entropy where it is wanted."""
    rows = _Rows(logprobs, cu_seqlens)
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        bonus = None if entropy is None else entropy.detach().requires_grad_(entropy_gradient)
        total, metrics = _total(
            rows, leaf, old_logprobs, advantages, mask, ref_logprobs, rollout_logprobs, bonus, rule
        )
        total = total + leaf.sum() * 0 if not total.requires_grad else total
        leaves = [leaf] + ([bonus] if bonus is not None and entropy_gradient else [])
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    grads = tuple(torch.where(mask, g, 0) for g in grads)
    count = metrics["tokens"] if SUMS[rule.aggregation] == "tokens" else metrics["sequences"]
    scale = rule.factor / (
        torch.full_like(count, rule.denominator) if rule.denominator else count.clamp(min=1)
    )
    values = torch.stack([total.detach() * scale, scale, *metrics.values()])
    return values, grads[0], grads[1] if len(grads) > 1 else None


class _Rows:
    """Sums over sequences, padded or packed, and what a sequence has given back to its tokens."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None) -> None:
        self.count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        rows = torch.arange(self.count, device=like.device)
        if cu_seqlens is None:
            self.of_token = rows[:, None].expand(like.shape)
        else:
            self.of_token = rows.repeat_interleave(cu_seqlens.diff(), output_size=like.shape[0])

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.count).index_add(0, self.of_token.reshape(-1), x.reshape(-1))

    def spread(self, x: Tensor) -> Tensor:
        return x[self.of_token]

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.sum(x) / self.sum(mask.to(x.dtype)).clamp(min=1)


def _total(
    rows: _Rows,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    entropy: Tensor | None,
    rule: PolicyRule,
) -> tuple[Tensor, dict[str, Tensor]]:
    if advantages.shape != logprobs.shape:
        advantages = rows.spread(advantages)
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    old = torch.where(mask, old_logprobs, 0)
    weight, kept = torch.ones_like(old), torch.ones_like(mask)
    if rule.correction:
        assert rollout_logprobs is not None
        weight, kept = _correction(rows, old - torch.where(mask, rollout_logprobs, 0), mask, rule)
        if rule.shrink:
            mask = mask & kept
    # a token that the mask hides is replaced before it meets any arithmetic: 0 * inf is NaN
    logp, old = torch.where(mask, logprobs, 0), torch.where(mask, old, 0)
    advantages = torch.where(mask, advantages, 0)
    difference = logp - old

    level, term = LEVELS[rule.level], POLICY_TERMS[rule.term]
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
    ratio = log_ratio.clamp(-rule.log_clip, rule.log_clip).exp()

    loss, low, high, far = _TERMS[term](rule, ratio, advantages, logp, old)
    if rule.correction:
        loss = torch.where(kept, loss * weight, 0)
    kl = torch.zeros_like(logp)
    if rule.kl:
        assert ref_logprobs is not None
        kl = _kl(rule, logp - torch.where(mask, ref_logprobs, 0))
        kl = kl * ratio if rule.kl_times_ratio else kl
        loss = loss + rule.beta * kl
    bonus = torch.zeros_like(logp)
    if entropy is not None:
        bonus = torch.where(mask, entropy, 0)
        loss = loss - rule.entropy_coef * bonus
    loss = torch.where(mask, loss, 0)
    by_row = rows.mean(loss, mask) if SUMS[rule.aggregation] == "sequence_means" else rows.sum(loss)

    tokens = mask.sum().to(logp.dtype)

    def mean_of(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0).sum() / tokens.clamp(min=1)

    with torch.no_grad():
        metrics = {
            "clip_fraction_low": mean_of(low),
            "clip_fraction_high": mean_of(high),
            "clip_fraction_far": mean_of(far),
            "approx_kl_k1": mean_of(-difference),
            "approx_kl_k3": mean_of(difference.expm1() - difference),
            "ratio_mean": mean_of(ratio),
            "ratio_max": torch.cat([torch.where(mask, ratio, 0).reshape(-1), ratio.new_zeros(1)]).max(),
            "entropy": mean_of(bonus),
            "kl_to_reference": mean_of(kl),
            "correction_weight_mean": mean_of(weight),
            "correction_kept": mean_of(kept.to(logp.dtype)),
            "tokens": tokens,
            "sequences": (rows.sum(mask.to(logp.dtype)) > 0).sum().to(logp.dtype),
            "not_finite": (~loss.isfinite()).sum().to(logp.dtype),
        }
    return by_row.sum(), metrics


def _clipped(rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor) -> tuple:
    plain = -ratio.clamp(max=rule.delta) * advantages
    bounded = -ratio.clamp(rule.low, rule.high) * advantages
    loss, negative = torch.maximum(plain, bounded), advantages < 0
    limit = torch.where(negative, -advantages * rule.dual, torch.inf)
    far = negative & ((loss > limit) | (ratio > rule.delta))
    low, high = negative & (ratio < rule.low), (advantages > 0) & (ratio > rule.high)
    return torch.minimum(loss, limit), low, high, far


def _cispo(rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor) -> tuple:
    loss = -ratio.clamp(rule.low, rule.high).detach() * advantages * logp
    return loss, ratio < rule.low, ratio > rule.high, torch.zeros_like(ratio)


def _reinforce(rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor) -> tuple:
    none = torch.zeros_like(ratio)
    return -advantages * logp, none, none, none


def _sapo(rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor) -> tuple:
    none = torch.zeros_like(ratio)
    tau = torch.where(advantages > 0, rule.tau_positive, rule.tau_negative).to(ratio.dtype)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, none, none, none


def _gmpo(rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor) -> tuple:
    difference = logp - old
    low, high = (advantages < 0) & (difference < rule.low), (advantages > 0) & (difference > rule.high)
    return -ratio * advantages, low, high, torch.zeros_like(ratio)


def _dppo_tv(rule: PolicyRule, ratio: Tensor, advantages: Tensor, logp: Tensor, old: Tensor) -> tuple:
    change = logp.exp() - old.exp()
    high = (advantages > 0) & (change > rule.high)
    low = (advantages <= 0) & (change < rule.low)
    loss = -ratio.clamp(max=rule.dual).detach() * advantages * logp
    return torch.where((low | high).detach(), 0, loss), low, high, ratio > rule.dual


_TERMS = {
    "clipped": _clipped,
    "cispo": _cispo,
    "reinforce": _reinforce,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "dppo_tv": _dppo_tv,
}


def _kl(rule: PolicyRule, d: Tensor) -> Tensor:
    value = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": torch.expm1(-d) + d}[KL_ESTIMATORS[rule.kl]]
    if rule.kl_gradient_of_k2:
        k2 = d * d / 2
        return value.detach() + k2 - k2.detach()
    return value


def _correction(rows: _Rows, drift: Tensor, mask: Tensor, rule: PolicyRule) -> tuple[Tensor, Tensor]:
    level, mode = CORRECTION_LEVELS[rule.correction], CORRECTION_MODES[rule.verdict]
    log_weight = drift
    if level != "token":
        log_weight = rows.spread(rows.sum(drift) if level == "sequence" else rows.mean(drift, mask))
    weight = log_weight.exp()
    kept = (weight >= rule.weight_low) & (weight <= rule.weight_high)
    if mode == "truncate":
        weight, kept = weight.clamp(rule.weight_low, rule.weight_high), torch.ones_like(kept)
    elif mode == "reject":
        weight = torch.ones_like(weight)
    vetoed = rows.spread(rows.sum((drift < rule.log_veto).to(drift.dtype)) > 0)
    kept = kept & ~vetoed
    return torch.where(kept, weight, 0), kept


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
        return torch.randn(*size, generator=g, dtype=torch.float64)

    old = -noise(*shape).abs()
    lengths = torch.randint(1, shape[-1] + 1, shape[:-1], generator=g)
    mask = (torch.arange(shape[-1]) < lengths[..., None]) & (torch.rand(shape, generator=g) > 0.1)
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
