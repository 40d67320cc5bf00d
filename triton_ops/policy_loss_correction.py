"""The rollout correction of one sequence of ``policy_loss`` in Triton: weights, and what is rejected.

As csrc/include/rlkernel/policy_loss/correction.h has it; ``rule`` and ``C`` are those of the terms.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops.policy_loss_terms import (
    Correction,
    Term,
    Verdict,
    clamp,
    expm1,
    in_support,
    moved_too_far,
    outside,
    total,
)

LOG_TINY = tl.constexpr(-18.420681)  # log(1e-8), the least that vespo takes for a weight


@triton.jit
def scored_of(old_logprobs, rollout_logprobs, i, present):
    """Whether the engine had a logprob for the token, which the old policy knows."""
    rollout = tl.load(rollout_logprobs + i, mask=present, other=0.0)
    return in_support(old_logprobs, i, in_support(rollout_logprobs, i, present)) & (rollout == rollout)


@triton.jit
def drift(old_logprobs, rollout_logprobs, i, present):
    """log(old / rollout); 0 where it has none."""
    scored = scored_of(old_logprobs, rollout_logprobs, i, present)
    rollout = tl.load(rollout_logprobs + i, mask=scored, other=0.0)
    return tl.load(old_logprobs + i, mask=scored, other=0.0) - rollout


@triton.jit
def gather(
    logprobs, old_logprobs, rollout_logprobs, mask, begin, end, rule, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What the whole sequence decides about its correction: its log weight, rejection, and in two bits
    whether it is too far off policy and too far from its rollout."""
    zero = tl.zeros((), tl.float64)
    count, whole, k1, k2, k3, tv, moved = zero, zero, zero, zero, zero, zero, zero
    least = tl.full((), float("inf"), tl.float32)
    most = tl.full((), float("-inf"), tl.float32)
    lanes = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        present = tl.load(mask + i, mask=i < end, other=0) != 0
        d = drift(old_logprobs, rollout_logprobs, i, present)
        x = clamp(d, -20.0, 20.0)
        count += tl.sum(present.to(tl.float64), axis=0)
        whole += total(d, present)
        k1 += total(x, present)
        if C.rejects_k2:
            k2 += total(x * x * 0.5, present)
        if C.rejects_k3:
            k3 += total(expm1(x) - x, present)
        if C.tv:
            tv += total(tl.abs(expm1(x)), present)
        if C.off_policy:
            known = in_support(logprobs, i, scored_of(old_logprobs, rollout_logprobs, i, present))
            behind = tl.load(rollout_logprobs + i, mask=known, other=0.0)
            moved += total(behind - tl.load(logprobs + i, mask=known, other=0.0), known)
        is_number = present & (d == d)
        least = tl.minimum(least, tl.min(tl.where(is_number, d, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(is_number, d, float("-inf")), axis=0))
    count = tl.maximum(count, 1.0)
    log_weight = tl.zeros((), tl.float32)
    if C.correction == Correction.sequence:
        log_weight = whole.to(tl.float32)
    if C.correction == Correction.geometric:
        log_weight = (whole / count).to(tl.float32)
    rejected = outside(k1.to(tl.float32), rule.sum_k1_low, rule.sum_k1_high)
    rejected = rejected | outside((k1 / count).to(tl.float32), rule.mean_k1_low, rule.mean_k1_high)
    if C.rejects_k2:
        rejected = rejected | (k2.to(tl.float32) > rule.sum_k2_high)
        rejected = rejected | ((k2 / count).to(tl.float32) > rule.mean_k2_high)
    if C.rejects_k3:
        rejected = rejected | (k3.to(tl.float32) > rule.sum_k3_high)
        rejected = rejected | ((k3 / count).to(tl.float32) > rule.mean_k3_high)
    rejected = rejected | (least < rule.extreme_low) | (most > rule.extreme_high)
    drifted = ((moved / count).to(tl.float32) > rule.off_policy_high).to(tl.int32)
    if C.tv:
        drifted += 2 * ((tv / count).to(tl.float32) > rule.tv_high).to(tl.int32)
    return log_weight, rejected.to(tl.int32), drifted


@triton.jit
def weigh(
    logprobs, old_logprobs, rollout_logprobs, staleness, row, i, present, advantage, log_weight, rejected,
    drifted, mean, rule, C: tl.constexpr, STALE_PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Weight, its logarithm as vespo adds it up, and which tokens are kept."""
    d = drift(old_logprobs, rollout_logprobs, i, present)
    x = d
    if C.correction != Correction.token:
        x = tl.zeros_like(d) + log_weight
    stale = tl.zeros_like(d)
    if staleness is not None:
        if STALE_PER_TOKEN:
            stale = tl.load(staleness + i, mask=present, other=0.0)
        else:
            stale = tl.where(present, tl.load(staleness + row), 0.0)
    if C.stale_only:
        x = tl.where(stale > 0, x, 0.0)
    weight = clamp(tl.exp(x), rule.weight_low, rule.weight_high)
    logarithm = clamp(clamp(x, rule.log_weight_low, rule.log_weight_high), LOG_TINY, 20.0)
    kept = present == present
    if C.verdict == Verdict.mask:
        kept = (x >= rule.log_weight_low) & (x <= rule.log_weight_high)
        weight, logarithm = tl.where(kept, weight, 0.0), tl.where(kept, logarithm, LOG_TINY)
    if C.term == Term.vespo:  # vespo takes the weight into its own
        weight, kept = tl.zeros_like(d) + 1.0, present == present
    weight = weight * tl.exp(stale * rule.log_decay) / mean

    nothing = tl.zeros_like(d)  # blocks, as Triton 3.9 interprets
    rejected, drifted, advantage = nothing + rejected, nothing.to(tl.int32) + drifted, nothing + advantage
    kept = kept & (outside(d, rule.token_low, rule.token_high) == 0) & (stale <= rule.max_staleness)
    kept = kept & (rejected == 0) & ((drifted % 2 == 0) | ((advantage < 0) == 0))
    if C.tv:
        kept = kept & ((drifted < 2) | ((d * advantage > 0) == 0))
    if C.sign_mask:
        known = in_support(logprobs, i, scored_of(old_logprobs, rollout_logprobs, i, present))
        logprob = tl.load(logprobs + i, mask=known, other=0.0)
        anchor = tl.load(rollout_logprobs + i, mask=known, other=0.0)
        low, high = moved_too_far(rule.sign_low, rule.sign_high, advantage, logprob, anchor, C.sign_mask)
        if C.two_sided:
            one = tl.zeros_like(d) + 1.0
            low, _ = moved_too_far(rule.sign_low, rule.sign_high, -one, logprob, anchor, C.sign_mask)
            _, high = moved_too_far(rule.sign_low, rule.sign_high, one, logprob, anchor, C.sign_mask)
        kept = kept & ((low | high) == 0)
    return weight, logarithm, kept
