"""What one token adds to ``policy_loss`` in Triton, as csrc/include/rlkernel/policy_loss/terms.h has it.

``rule`` and ``C`` are the numbers and the choices of ``rlkernel.calls.policy_loss.PolicyRule``.
"""

import triton
import triton.language as tl

from rlkernel.calls import policy_loss as names
from rlkernel.triton_ops._exact import expm1_small
from rlkernel.triton_ops._names import Names

Term = Names(names.POLICY_TERMS)
Level = Names(names.LEVELS)
Aggregate = Names(names.SUMS)
Kl = Names(names.KL_ESTIMATORS)
KlWeight = Names(names.KL_WEIGHTS)
Divergence = Names(names.DIVERGENCES)
Correction = Names(names.CORRECTION_LEVELS)
Verdict = Names(names.CORRECTION_MODES)


@triton.jit
def expm1(x):
    """Polynomial where exp(x) - 1 would cancel."""
    return tl.where(tl.abs(x) < 0.346, expm1_small(x), tl.exp(x) - 1.0)


@triton.jit
def clamp(x, low, high):
    """NaN stays NaN."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def difference(first, second, i, present):
    """The difference of two log-probabilities, 0 where the mask hides the token."""
    return tl.load(first + i, mask=present, other=0.0) - tl.load(second + i, mask=present, other=0.0)


@triton.jit
def in_support(logprobs, i, present):
    """Of the tokens that are present those whose log-probability is not -inf."""
    return present & (tl.load(logprobs + i, mask=present, other=0.0) != float("-inf"))


@triton.jit
def outside(x, low, high):
    """NaN is not."""
    return (x < low) | (x > high)


@triton.jit
def counted(product, factor):
    """0 where the factor is: 0 * inf is NaN, and what has no weight is a metric."""
    return tl.where(factor == 0, 0.0, product)


@triton.jit
def total(x, present):
    return tl.sum(tl.where(present, x, 0.0).to(tl.float64), axis=0)


@triton.jit
def own_log_ratio(d, advantage, rule, C: tl.constexpr):
    """gmpo clips each token's logarithm before the mean, on the side that the advantage favours."""
    if C.term == Term.gmpo:
        up, down = tl.where(d > rule.high, rule.high, d), tl.where(d < rule.low, rule.low, d)
        value = tl.where(advantage > 0, up, tl.where(advantage == 0, 0.0, down))
        passes = (value == d) & (advantage != 0)
    else:
        value, passes = d, d == d
    return value, passes


@triton.jit
def moved_too_far(low, high, advantage, logprob, anchor, DIVERGENCE: tl.constexpr):
    """Where the probability fell or rose further from its anchor's than allowed, with the advantage."""
    p, q = tl.exp(logprob), tl.exp(anchor)
    change = p - q
    if DIVERGENCE == Divergence.kl:  # 1 - p = -expm1: the difference would cancel where p is near 1
        m, n = -expm1(logprob), -expm1(anchor)
        not_p, not_q = tl.where(m > 0, m, 0.0), tl.where(n > 0, n, 0.0)
        kl = q * (anchor - logprob) + not_q * tl.log((not_q + 1e-8) / (not_p + 1e-8))
        change = tl.where(change > 0, kl, tl.where(change < 0, -kl, change))
    return (advantage <= 0) & (change < low), (advantage > 0) & (change > high)


@triton.jit
def likelihood(weight, advantage, logprob):
    """-weight A logprob: the weight has no gradient."""
    direct = -weight * advantage
    return tl.where(direct == 0, 0.0, direct * logprob), direct


@triton.jit
def gamma_weight(k, rate, log_w):
    """vespo's weight exp(lambda + k log w - lambda w) of a sequence whose whole ratio is w."""
    phi = tl.exp(rate + k * log_w - rate * tl.exp(log_w))
    return tl.where(phi - phi == 0, phi, 0.0)


@triton.jit
def term(ratio, advantage, logprob, old_logprob, phi_positive, phi_negative, rule, C: tl.constexpr):
    """Value, derivative by the log-probability at a fixed ratio, by the log ratio; clipped low, high, far."""
    zero = tl.zeros_like(ratio)
    positive, negative = advantage > 0, advantage < 0
    value, direct, chain = zero, zero, zero
    is_low, is_high, is_far = zero > 1, zero > 1, zero > 1
    if C.term == Term.clipped:
        plain = -tl.where(ratio > rule.delta, rule.delta, ratio) * advantage
        bounded = -clamp(ratio, rule.low, rule.high) * advantage
        value = tl.where(bounded > plain, bounded, plain)
        limit = -advantage * rule.dual
        is_dual = negative & (value > limit)
        value = tl.where(is_dual, limit, value)
        # flat where the bound that holds is; between a small delta and the upper bound only one of them is
        is_flat = tl.where(bounded > plain, (ratio < rule.low) | (ratio > rule.high), ratio > rule.delta)
        chain = tl.where(is_flat | is_dual, 0.0, -ratio * advantage)
        is_low, is_high = negative & (ratio < rule.low), positive & (ratio > rule.high)
        is_far = is_dual | (negative & (ratio > rule.delta))
    elif C.term == Term.cispo:
        value, direct = likelihood(clamp(ratio, rule.low, rule.high), advantage, logprob)
        is_low, is_high = ratio < rule.low, ratio > rule.high
    elif C.term == Term.reinforce:
        value, direct = likelihood(zero + 1.0, advantage, logprob)
    elif C.term == Term.sapo:
        tau = tl.where(positive, rule.tau_positive, rule.tau_negative)
        scale = tl.where(positive, 4.0 / rule.tau_positive, 4.0 / rule.tau_negative)  # one division less
        e = tl.exp(-tl.abs(tau * (ratio - 1.0)))
        inverse = 1.0 / (1.0 + e)
        value = -advantage * tl.where(ratio >= 1.0, inverse, e * inverse) * scale
        chain = tl.where(e > 0, -advantage * 4.0 * e * inverse * inverse * ratio, 0.0)
    elif C.term == Term.gmpo:
        value = -ratio * advantage
        chain = value
        d = logprob - old_logprob
        is_low, is_high = negative & (d < rule.low), positive & (d > rule.high)
    elif C.term == Term.dppo:
        is_low, is_high = moved_too_far(rule.low, rule.high, advantage, logprob, old_logprob, C.divergence)
        held = tl.where(ratio > rule.dual, rule.dual, ratio)
        held = tl.where(is_high | is_low, 0.0, held)
        advantage = tl.where(held == 0, 0.0, advantage)  # 0 times an infinite one is NaN
        value, direct = likelihood(held, advantage, logprob)
        is_far = ratio > rule.dual
    elif C.term == Term.vespo:
        value, direct = likelihood(tl.where(negative, phi_negative, phi_positive), advantage, logprob)
    elif C.term == Term.surrogate:
        value = -ratio * advantage
        chain = value
    elif C.term == Term.dro:
        d = logprob - old_logprob
        value = rule.coefficient * 0.5 * d * d - logprob * advantage
        direct = rule.coefficient * d - advantage
    else:  # Term.cispo_mask
        is_low, is_high = ratio <= rule.low, ratio >= rule.high
        value, direct = likelihood(tl.where(is_low | is_high, 0.0, ratio), advantage, logprob)
    return value, direct, chain, is_low, is_high, is_far


@triton.jit
def apply_selection(value, direct, chain, selected, d, rule, C: tl.constexpr):
    """Tokens that the covariance has picked: kl_cov adds |d| to their loss, clip_cov drops them."""
    if C.term == Term.surrogate:
        slope = tl.where(d > 0, rule.coefficient, tl.where(d < 0, -rule.coefficient, 0.0))
        value += tl.where(selected, rule.coefficient * tl.abs(d), 0.0)
        direct += tl.where(selected, slope, 0.0)
    else:
        value, direct = tl.where(selected, 0.0, value), tl.where(selected, 0.0, direct)
        chain = tl.where(selected, 0.0, chain)
    return value, direct, chain


@triton.jit
def kl_to_reference(d, weight, rule, C: tl.constexpr):
    """The estimate times its weight, its slope, and the derivative that reaches the weight."""
    x = clamp(d, -rule.kl_input, rule.kl_input)
    if C.kl == Kl.k1:
        value, slope = x, tl.zeros_like(x) + 1.0
    elif C.kl == Kl.abs:
        value, slope = tl.abs(x), tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
    elif C.kl == Kl.k2:
        value, slope = x * x * 0.5, x
    else:
        m = expm1(-x)
        value, slope = m + x, -m
    whole = value * weight
    shut = outside(d, -rule.kl_input, rule.kl_input) | outside(whole, -rule.kl_output, rule.kl_output)
    # k2's slope knows of no bound, that of the weight does
    slope = d * weight if C.kl_gradient_of_k2 else tl.where(shut, 0.0, slope * weight)
    return clamp(whole, -rule.kl_output, rule.kl_output), slope, tl.where(shut, 0.0, value)


@triton.jit
def bounds(cu_seqlens, row, length):
    """Where a sequence begins and ends.  Offsets that nobody checked lead to no illegal access."""
    if cu_seqlens is not None:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row), 0), length)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + row + 1), 0), length)
    else:
        begin = row * length
        end = begin + length
    return begin, end
