"""The Triton kernels of ``policy_loss``.  The numbers of the choices are those of ``rlkernel.types``.

Sums are of fp64 in blocks of a fixed size, so that their order follows from the place in the sequence.
Alignment decides Triton's layouts, and with them the order of a sum: no argument is specialised by it.
"""

import triton
import triton.language as tl

COLUMNS = 15  # of partials: the sums below, then the largest ratio
TENSORS = (
    "logprobs", "old_logprobs", "advantages", "mask", "cu_seqlens", "ref_logprobs", "rollout_logprobs",
    "entropy", "grad_logprobs", "grad_entropy", "partials",
)  # fmt: skip
NUMBERS = (
    "length", "low", "high", "delta", "dual", "log_clip", "tau_positive", "tau_negative", "beta",
    "entropy_coef", "weight_low", "weight_high", "log_veto",
)  # fmt: skip


@triton.jit
def expm1(x):
    """Polynomial where exp(x) - 1 would cancel."""
    p = tl.full(x.shape, 1.991993e-4, tl.float32)
    p = tl.fma(p, x, 1.3945091e-3)
    p = tl.fma(p, x, 8.3332649e-3)
    p = tl.fma(p, x, 4.1666303e-2)
    p = tl.fma(p, x, 1.6666667e-1)
    p = tl.fma(p, x, 0.5)
    return tl.where(tl.abs(x) < 0.346, tl.fma(p * x, x, x), tl.exp(x) - 1.0)


@triton.jit
def clamp(x, low, high):
    """NaN stays NaN."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def drift(first, second, i, present):
    """The difference of two log-probabilities, 0 where the mask hides the token."""
    return tl.load(first + i, mask=present, other=0.0) - tl.load(second + i, mask=present, other=0.0)


@triton.jit
def weigh(x, vetoed, low, high, VERDICT: tl.constexpr):
    w = tl.exp(x)
    inside = (w >= low) & (w <= high)
    if VERDICT == 0:
        weight, kept = clamp(w, low, high), inside | True
    elif VERDICT == 1:
        weight, kept = tl.where(inside, w, 0.0), inside
    else:
        weight, kept = tl.where(inside, 1.0, 0.0), inside
    kept = kept & (vetoed == 0)
    return tl.where(kept, weight, 0.0), kept


@triton.jit
def own_log_ratio(d, advantage, low, high, TERM: tl.constexpr):
    if TERM == 4:
        value = tl.where(advantage > 0, tl.where(d > high, high, d), tl.where(d < low, low, d))
        value = tl.where(advantage == 0, 0.0, value)
        passes = (value == d) & (advantage != 0)
    else:
        value, passes = d, d == d
    return value, passes


@triton.jit
def term(
    ratio,
    advantage,
    logprob,
    old_logprob,
    low,
    high,
    delta,
    dual,
    tau_positive,
    tau_negative,
    TERM: tl.constexpr,
):
    """Value, derivative by the log-probability at a fixed ratio, by the log ratio; clipped low, high, far."""
    zero = tl.zeros_like(ratio)
    positive, negative = advantage > 0, advantage < 0
    direct, chain = zero, zero
    is_low, is_high, is_far = zero > 1, zero > 1, zero > 1
    if TERM == 0:
        plain = -tl.where(ratio > delta, delta, ratio) * advantage
        bounded = -clamp(ratio, low, high) * advantage
        value = tl.where(bounded > plain, bounded, plain)
        limit = -advantage * dual
        is_dual = negative & (value > limit)
        value = tl.where(is_dual, limit, value)
        chain = tl.where((bounded > plain) | is_dual | (ratio > delta), 0.0, -ratio * advantage)
        is_low, is_high = negative & (ratio < low), positive & (ratio > high)
        is_far = is_dual | (negative & (ratio > delta))
    elif TERM == 1:
        direct = -clamp(ratio, low, high) * advantage
        value = direct * logprob
        is_low, is_high = ratio < low, ratio > high
    elif TERM == 2:
        direct = -advantage
        value = direct * logprob
    elif TERM == 3:
        tau = tl.where(positive, tau_positive, tau_negative)
        e = tl.exp(-tl.abs(tau * (ratio - 1.0)))
        inverse = 1.0 / (1.0 + e)
        value = -advantage * tl.where(ratio >= 1.0, inverse, e * inverse) * 4.0 / tau
        chain = tl.where(e > 0, -advantage * 4.0 * e * inverse * inverse * ratio, 0.0)
    elif TERM == 4:
        value = -ratio * advantage
        chain = value
        d = logprob - old_logprob
        is_low, is_high = negative & (d < low), positive & (d > high)
    else:
        change = tl.exp(logprob) - tl.exp(old_logprob)
        is_high, is_low = positive & (change > high), (advantage <= 0) & (change < low)
        direct = tl.where(is_high | is_low, 0.0, -tl.where(ratio > dual, dual, ratio) * advantage)
        value = tl.where(direct == 0, 0.0, direct * logprob)
        is_far = ratio > dual
    return value, direct, chain, is_low, is_high, is_far


@triton.jit
def kl_to_reference(d, KL: tl.constexpr, KL_OF_K2: tl.constexpr):
    if KL == 1:
        value, slope = d, tl.zeros_like(d) + 1.0
    elif KL == 2:
        value, slope = tl.abs(d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    elif KL == 3:
        value, slope = d * d * 0.5, d
    else:
        m = expm1(-d)
        value, slope = m + d, -m
    if KL_OF_K2:
        slope = d
    return value, slope


@triton.jit
def total(x, present):
    return tl.sum(tl.where(present, x, 0.0).to(tl.float64), axis=0)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def sequence_kernel(
    logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, entropy,
    grad_logprobs, grad_entropy, partials, length, low, high, delta, dual, log_clip, tau_positive,
    tau_negative, beta, entropy_coef, weight_low, weight_high, log_veto,
    PER_TOKEN: tl.constexpr, TERM: tl.constexpr, LEVEL: tl.constexpr, MEANS: tl.constexpr, KL: tl.constexpr,
    KL_OF_K2: tl.constexpr, KL_RATIO: tl.constexpr, CORRECTION: tl.constexpr, VERDICT: tl.constexpr,
    SHRINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if cu_seqlens is not None:
        # offsets that nobody checked lead to no illegal access
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + row), 0), length)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + row + 1), 0), length)
    else:
        begin = row * length
        end = begin + length
    lanes = tl.arange(0, BLOCK)

    log_weight = 0.0
    vetoed = 0
    if CORRECTION:
        sum_drift = tl.zeros((), tl.float64)
        seen = tl.zeros((), tl.float64)
        least = tl.zeros((), tl.float32)
        for start in range(begin, end, BLOCK):
            i = start + lanes
            present = tl.load(mask + i, mask=i < end, other=0) != 0
            d = drift(old_logprobs, rollout_logprobs, i, present)
            sum_drift += total(d, present)
            seen += total(d * 0.0 + 1.0, present)
            least = tl.minimum(least, tl.min(tl.where(present, d, 0.0), axis=0))
        if CORRECTION == 3:
            sum_drift = sum_drift / tl.maximum(seen, 1.0)
        log_weight = sum_drift.to(tl.float32)
        vetoed = (least < log_veto).to(tl.int32)

    count = tl.zeros((), tl.float64) + 1.0
    mean = tl.zeros((), tl.float32)
    if (LEVEL != 0) | MEANS:
        tokens = tl.zeros((), tl.float64)
        log_ratios = tl.zeros((), tl.float64)
        for start in range(begin, end, BLOCK):
            i = start + lanes
            present = tl.load(mask + i, mask=i < end, other=0) != 0
            if SHRINK:
                x = tl.zeros_like(lanes).to(tl.float32) + log_weight
                if CORRECTION == 1:
                    x = drift(old_logprobs, rollout_logprobs, i, present)
                weight, kept = weigh(x, vetoed, weight_low, weight_high, VERDICT)
                present = present & kept
            tokens += tl.sum(present.to(tl.float64), axis=0)
            if LEVEL != 0:
                if PER_TOKEN:
                    advantage = tl.load(advantages + i, mask=present, other=0.0)
                else:
                    advantage = tl.zeros_like(lanes).to(tl.float32) + tl.load(advantages + row)
                d = tl.zeros_like(lanes).to(tl.float32)
                if old_logprobs is not None:
                    d = drift(logprobs, old_logprobs, i, present)
                own, _ = own_log_ratio(d, advantage, low, high, TERM)
                log_ratios += total(own, present)
        count = tl.maximum(tokens, 1.0)
        mean = (log_ratios / count).to(tl.float32)
    bounded_mean = clamp(mean, -log_clip, log_clip)
    mean_passes = tl.where(bounded_mean == mean, 1.0, 0.0)
    share = tl.full((), 1.0, tl.float32)
    if MEANS:
        share = (1.0 / count).to(tl.float32)

    zero = tl.zeros((), tl.float64)
    s_loss, s_tokens, s_low, s_high, s_far, s_k1, s_k3 = zero, zero, zero, zero, zero, zero, zero
    s_ratio, s_entropy, s_kl, s_weight, s_kept, s_odd, s_chain = zero, zero, zero, zero, zero, zero, zero
    largest = tl.zeros((), tl.float32)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        inside = i < end
        present = tl.load(mask + i, mask=inside, other=0) != 0
        weight = tl.zeros_like(lanes).to(tl.float32) + 1.0
        kept = lanes >= 0
        if CORRECTION:
            x = tl.zeros_like(lanes).to(tl.float32) + log_weight
            if CORRECTION == 1:
                x = drift(old_logprobs, rollout_logprobs, i, present)
            weight, kept = weigh(x, vetoed, weight_low, weight_high, VERDICT)
            if SHRINK:
                present = present & kept
        if PER_TOKEN:
            advantage = tl.load(advantages + i, mask=present, other=0.0)
        else:
            advantage = tl.where(present, tl.load(advantages + row), 0.0)
        logprob = tl.load(logprobs + i, mask=present, other=0.0)
        old_logprob = logprob
        if old_logprobs is not None:
            old_logprob = tl.load(old_logprobs + i, mask=present, other=0.0)
        d = logprob - old_logprob
        own, own_passes = own_log_ratio(d, advantage, low, high, TERM)
        passes = tl.where(own_passes, 1.0, 0.0)
        if LEVEL == 0:
            log_ratio = clamp(own, -log_clip, log_clip)
            passes = tl.where(log_ratio == own, passes, 0.0)
        else:
            log_ratio = tl.zeros_like(d) + bounded_mean
            passes = passes * mean_passes
        ratio = tl.exp(log_ratio)
        value, direct, chain, is_low, is_high, is_far = term(
            ratio, advantage, logprob, old_logprob, low, high, delta, dual, tau_positive, tau_negative, TERM
        )
        if CORRECTION:
            value = tl.where(kept, value * weight, 0.0)
            direct = tl.where(kept, direct * weight, 0.0)
            chain = tl.where(kept, chain * weight, 0.0)
        if KL:
            kl, slope = kl_to_reference(drift(logprobs, ref_logprobs, i, present), KL, KL_OF_K2)
            if KL_RATIO:
                kl, slope = kl * ratio, slope * ratio
                chain += beta * kl
            value += beta * kl
            direct += beta * slope
            s_kl += total(kl, present)
        if entropy is not None:
            h = tl.load(entropy + i, mask=present, other=0.0)
            value -= entropy_coef * h
            s_entropy += total(h, present)
            if grad_entropy is not None:
                tl.store(grad_entropy + i, tl.where(present, -entropy_coef * share, 0.0), mask=inside)
        if LEVEL == 1:
            grad = direct
            s_chain += total(chain, present)
        else:
            grad = direct + chain * passes
        tl.store(grad_logprobs + i, tl.where(present, grad * share, 0.0), mask=inside)
        one = tl.zeros_like(d) + 1.0
        s_loss += total(value * share, present)
        s_tokens += total(one, present)
        s_low += total(one, present & is_low)
        s_high += total(one, present & is_high)
        s_far += total(one, present & is_far)
        s_k1 += total(-d, present)
        s_k3 += total(expm1(d) - d, present)
        s_ratio += total(ratio, present)
        s_weight += total(weight, present)
        s_kept += total(one, present & kept)
        s_odd += total(one, present & ((value - value) != 0.0))
        largest = tl.maximum(largest, tl.max(tl.where(present & (ratio > 0), ratio, 0.0), axis=0))

    if LEVEL == 1:  # the ratio of the sequence hangs on every token of it
        part = mean_passes * (s_chain / count).to(tl.float32) * share
        tl.debug_barrier()
        for start in range(begin, end, BLOCK):
            i = start + lanes
            inside = i < end
            present = tl.load(mask + i, mask=inside, other=0) != 0
            if SHRINK:
                x = tl.zeros_like(lanes).to(tl.float32) + log_weight
                if CORRECTION == 1:
                    x = drift(old_logprobs, rollout_logprobs, i, present)
                weight, kept = weigh(x, vetoed, weight_low, weight_high, VERDICT)
                present = present & kept
            through = part + tl.zeros_like(lanes).to(tl.float32)
            if TERM == 4:
                if PER_TOKEN:
                    advantage = tl.load(advantages + i, mask=present, other=0.0)
                else:
                    advantage = tl.zeros_like(lanes).to(tl.float32) + tl.load(advantages + row)
                d = tl.zeros_like(through)
                if old_logprobs is not None:
                    d = drift(logprobs, old_logprobs, i, present)
                _, own_passes = own_log_ratio(d, advantage, low, high, TERM)
                through = tl.where(own_passes, through, 0.0)
            grad = tl.load(grad_logprobs + i, mask=present, other=0.0) + through
            tl.store(grad_logprobs + i, grad, mask=present)

    out = partials + row * 15
    tl.store(out, s_loss)
    tl.store(out + 1, s_tokens)
    tl.store(out + 2, tl.where(s_tokens > 0, 1.0, 0.0).to(tl.float64))
    tl.store(out + 3, s_low)
    tl.store(out + 4, s_high)
    tl.store(out + 5, s_far)
    tl.store(out + 6, s_k1)
    tl.store(out + 7, s_k3)
    tl.store(out + 8, s_ratio)
    tl.store(out + 9, s_entropy)
    tl.store(out + 10, s_kl)
    tl.store(out + 11, s_weight)
    tl.store(out + 12, s_kept)
    tl.store(out + 13, s_odd)
    tl.store(out + 14, largest.to(tl.float64))


@triton.jit
def column(partials, rows, k, BLOCK: tl.constexpr):
    """The sum of a column in the order of the rows: BLOCK chains, then the chains."""
    lanes = tl.arange(0, BLOCK)
    chains = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        r = (start + lanes).to(tl.int64)
        chains += tl.load(partials + r * 15 + k, mask=r < rows, other=0.0)
    return tl.sum(chains, axis=0)


@triton.jit(
    do_not_specialize=["rows", "denominator", "factor"], do_not_specialize_on_alignment=["partials", "values"]
)
def values_kernel(partials, rows, values, denominator, factor, BY_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        r = (start + lanes).to(tl.int64)
        largest = tl.maximum(largest, tl.load(partials + r * 15 + 14, mask=r < rows, other=0.0))
    tokens = column(partials, rows, 1, BLOCK)
    sequences = column(partials, rows, 2, BLOCK)
    here = sequences
    if BY_TOKEN:
        here = tokens
    below = tl.where(denominator > 0, tl.full((), denominator, tl.float64), tl.maximum(here, 1.0))
    scale = tl.full((), factor, tl.float64) / below
    tl.store(values, (column(partials, rows, 0, BLOCK) * scale).to(tl.float32))
    tl.store(values + 1, scale.to(tl.float32))
    each = 1.0 / tl.maximum(tokens, 1.0)
    for k in tl.static_range(6):
        tl.store(values + 2 + k, (column(partials, rows, 3 + k, BLOCK) * each).to(tl.float32))
    tl.store(values + 8, tl.max(largest, axis=0).to(tl.float32))
    for k in tl.static_range(4):
        tl.store(values + 9 + k, (column(partials, rows, 9 + k, BLOCK) * each).to(tl.float32))
    tl.store(values + 13, tokens.to(tl.float32))
    tl.store(values + 14, sequences.to(tl.float32))
    tl.store(values + 15, column(partials, rows, 13, BLOCK).to(tl.float32))
