"""The Triton kernels of ``policy_loss``, for a sequence each, and those that join the sequences.

Sums are of fp64 in blocks of a fixed size, so that their order follows from the place in the sequence.
Alignment decides Triton's layouts, and with them the order of a sum: no argument is specialised by it.
"""

import triton
import triton.language as tl

from rlkernel.calls.policy_loss import POLICY_METRICS
from rlkernel.triton_ops._names import Names, store_all
from rlkernel.triton_ops.policy_loss_correction import LOG_TINY, gather, weigh
from rlkernel.triton_ops.policy_loss_terms import (
    Aggregate,
    Correction,
    KlWeight,
    Level,
    Term,
    apply_selection,
    bounds,
    clamp,
    counted,
    difference,
    expm1,
    gamma_weight,
    in_support,
    kl_to_reference,
    own_log_ratio,
    term,
    total,
)

# of partials: sums of a sequence, and its largest ratio
Column = Names((
    "loss", "tokens", "sequences", "low", "high", "far", "k1", "k3", "ratio", "entropy", "kl", "weight",
    "kept", "not_finite", "outside", "largest",
))  # fmt: skip
COLUMNS = tl.constexpr(len(Column))
WeightColumn = Names(("weights", "count"))  # of partials, before anything is rejected
Value = Names(("loss", "scale", *POLICY_METRICS, "mean_weight"))
TENSORS = (
    "logprobs", "old_logprobs", "advantages", "mask", "cu_seqlens", "ref_logprobs", "rollout_logprobs",
    "entropy", "staleness", "selected", "token_counts", "grad_logprobs", "grad_entropy", "partials", "values",
)  # fmt: skip


@triton.jit
def advantage_of(advantages, row, i, present, PER_TOKEN: tl.constexpr):
    if PER_TOKEN:
        return tl.load(advantages + i, mask=present, other=0.0)
    else:
        return tl.where(present, tl.load(advantages + row), 0.0)


@triton.jit
def count_of(mask):
    return tl.sum(mask.to(tl.int32), axis=0)


@triton.jit
def log_ratio_of(logprobs, old_logprobs, i, present):
    if old_logprobs is None:
        return tl.where(present, 0.0, 0.0)
    else:
        return difference(logprobs, old_logprobs, i, present)


@triton.jit
def supported_of(logprobs, old_logprobs, i, present):
    """A token outside of its support adds nothing, but counts: so the counts are known before the
    logprobs."""
    supported = in_support(logprobs, i, present)
    if old_logprobs is not None:
        supported = in_support(old_logprobs, i, supported)
    return supported


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=TENSORS)
def weights_kernel(
    logprobs, old_logprobs, mask, cu_seqlens, rollout_logprobs, staleness, partials, length, rule,
    C: tl.constexpr, STALE_PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For the mean weight of the batch: the sums of one sequence, before anything is rejected."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    log_weight, rejected, drifted = gather(
        logprobs, old_logprobs, rollout_logprobs, mask, begin, end, rule, C, BLOCK
    )
    weights = tl.zeros((), tl.float64)
    tokens = tl.zeros((), tl.float64)
    lanes = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        present = tl.load(mask + i, mask=i < end, other=0) != 0
        advantage = tl.where(present, 0.0, 0.0)
        weight, _, _ = weigh(
            logprobs, old_logprobs, rollout_logprobs, staleness, row, i, present, advantage, log_weight,
            rejected, drifted, 1.0, rule, C, STALE_PER_TOKEN,
        )  # fmt: skip
        weights += total(weight, present)
        tokens += tl.sum(present.to(tl.float64), axis=0)
    if (C.correction == Correction.sequence) | (C.correction == Correction.geometric):
        weights = weights / tl.maximum(tokens, 1.0)
        tokens = tl.where(tokens > 0, 1.0, 0.0).to(tl.float64)
    store_all(partials + row * COLUMNS, (weights, tokens))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["partials", "values"])
def mean_weight_kernel(partials, rows, values, BLOCK: tl.constexpr):
    count = column(partials, rows, WeightColumn.count, COLUMNS, BLOCK)
    mean = column(partials, rows, WeightColumn.weights, COLUMNS, BLOCK) / tl.maximum(count, 1.0)
    tl.store(values + Value.mean_weight, tl.where(mean > 1e-8, mean, 1.0).to(tl.float32))


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=TENSORS)
def sequence_kernel(
    logprobs, old_logprobs, advantages, mask, cu_seqlens, ref_logprobs, rollout_logprobs, entropy, staleness,
    selected, token_counts, grad_logprobs, grad_entropy, partials, values, length, rule,
    C: tl.constexpr, PER_TOKEN: tl.constexpr, STALE_PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    lanes = tl.arange(0, BLOCK)

    log_weight, rejected, drifted, mean_weight = 0.0, 0, 0, 1.0
    if C.correction:
        log_weight, rejected, drifted = gather(
            logprobs, old_logprobs, rollout_logprobs, mask, begin, end, rule, C, BLOCK
        )
        if C.normalize:
            mean_weight = tl.load(values + Value.mean_weight)

    count = tl.zeros((), tl.float64) + 1.0
    mean = tl.zeros((), tl.float32)
    phi_positive, phi_negative = 0.0, 0.0
    if (C.level != Level.token) | (C.aggregation == Aggregate.sequence_means) | (C.term == Term.vespo):
        tokens = tl.zeros((), tl.float64)
        log_ratios = tl.zeros((), tl.float64)
        log_w = tl.zeros((), tl.float64)
        log_weights = tl.zeros((), tl.float64)
        for start in range(begin, end, BLOCK):
            i = start + lanes
            present = tl.load(mask + i, mask=i < end, other=0) != 0
            advantage = advantage_of(advantages, row, i, present, PER_TOKEN)
            if C.shrink | ((C.term == Term.vespo) & (C.correction != Correction.absent)):
                _, logarithm, kept = weigh(
                    logprobs, old_logprobs, rollout_logprobs, staleness, row, i, present, advantage,
                    log_weight, rejected, drifted, mean_weight, rule, C, STALE_PER_TOKEN,
                )  # fmt: skip
                if C.shrink:
                    present = present & kept
                    advantage = tl.where(present, advantage, 0.0)
                log_weights += total(logarithm, present)
            tokens += tl.sum(present.to(tl.float64), axis=0)
            supported = supported_of(logprobs, old_logprobs, i, present)
            d = log_ratio_of(logprobs, old_logprobs, i, supported)
            own, _ = own_log_ratio(d, advantage, rule, C)
            log_ratios += total(own, supported)
            log_w += total(clamp(d, -20.0, 20.0), supported)
        count = tl.maximum(tokens, 1.0)
        mean = (log_ratios / count).to(tl.float32)
        if C.term == Term.vespo:
            if C.correction == Correction.token:
                log_w += log_weights
            elif C.correction:
                log_w += log_weights / count
            w = clamp(log_w.to(tl.float32), LOG_TINY, 20.0)
            phi_positive = gamma_weight(rule.k_positive, rule.lambda_positive, w)
            phi_negative = gamma_weight(rule.k_negative, rule.lambda_negative, w)
    bounded_mean = clamp(mean, -rule.log_clip, rule.log_clip)
    mean_passes = tl.where(bounded_mean == mean, 1.0, 0.0)
    share = tl.full((), 1.0, tl.float32)
    if C.aggregation == Aggregate.sequence_means:
        divisor = count
        if token_counts is not None:
            given = tl.load(token_counts + row).to(tl.float64)
            counts = (given >= 0.0) & (given < float("inf"))  # else NaN, as nobody could look
            divisor = tl.where(counts, tl.maximum(given, 1.0), float("nan"))
        share = (1.0 / divisor).to(tl.float32)

    zero = tl.zeros((), tl.float64)
    s_loss, s_k1, s_k3, s_ratio, s_entropy, s_kl, s_weight = zero, zero, zero, zero, zero, zero, zero
    s_chain = zero
    none = tl.zeros((), tl.int32)  # a count in half of the registers
    s_tokens, s_low, s_high, s_far, s_kept, s_odd, s_outside = none, none, none, none, none, none, none
    largest = tl.zeros((), tl.float32)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        inside = i < end
        present = tl.load(mask + i, mask=inside, other=0) != 0
        advantage = advantage_of(advantages, row, i, present, PER_TOKEN)
        weight = tl.zeros_like(lanes).to(tl.float32) + 1.0
        kept = lanes >= 0
        if C.correction:
            weight, _, kept = weigh(
                logprobs, old_logprobs, rollout_logprobs, staleness, row, i, present, advantage, log_weight,
                rejected, drifted, mean_weight, rule, C, STALE_PER_TOKEN,
            )  # fmt: skip
            if C.shrink:
                present = present & kept
                advantage = tl.where(present, advantage, 0.0)
        supported = supported_of(logprobs, old_logprobs, i, present)
        advantage = tl.where(supported, advantage, 0.0)
        logprob = tl.load(logprobs + i, mask=supported, other=0.0)
        old_logprob = logprob
        if old_logprobs is not None:
            old_logprob = tl.load(old_logprobs + i, mask=supported, other=0.0)
        d = logprob - old_logprob
        own, own_passes = own_log_ratio(d, advantage, rule, C)
        passes = tl.where(own_passes, 1.0, 0.0)
        if C.level == Level.token:
            log_ratio = clamp(own, -rule.log_clip, rule.log_clip)
            passes = tl.where(log_ratio == own, passes, 0.0)
        else:
            log_ratio = tl.zeros_like(d) + bounded_mean
            passes = passes * mean_passes
        ratio = tl.exp(log_ratio)
        value, direct, chain, is_low, is_high, is_far = term(
            ratio, advantage, logprob, old_logprob, phi_positive, phi_negative, rule, C
        )
        if selected is not None:
            picked = supported & (tl.load(selected + i, mask=present, other=0) != 0)
            value, direct, chain = apply_selection(value, direct, chain, picked, d, rule, C)
            is_far = is_far | picked
        if C.correction:
            value = tl.where(kept, value * weight, 0.0)
            direct = tl.where(kept, direct * weight, 0.0)
            chain = tl.where(kept, chain * weight, 0.0)
        referred = supported
        if C.kl:
            referred = in_support(ref_logprobs, i, supported)
            kl_weight = tl.zeros_like(d) + 1.0
            if C.kl_weight == KlWeight.ratio:
                kl_weight = ratio
            if C.kl_weight == KlWeight.token:
                kl_weight = tl.exp(d)
            if C.kl_weight == KlWeight.rollout:
                kl_weight = tl.exp(difference(logprobs, rollout_logprobs, i, supported))
                kl_weight = tl.where(kl_weight - kl_weight == 0, kl_weight, 0.0)
            kl_weight = tl.where(referred, kl_weight, 0.0)
            kl, slope, through = kl_to_reference(
                difference(logprobs, ref_logprobs, i, referred), kl_weight, rule, C
            )
            value += counted(rule.beta * kl, rule.beta)
            direct += counted(rule.beta * slope, rule.beta)
            if C.kl_weight == KlWeight.ratio:
                chain += counted(rule.beta * through * kl_weight, rule.beta)
            elif C.kl_weight:
                direct += counted(rule.beta * through * kl_weight, rule.beta)
            s_kl += total(kl, referred)
        if entropy is not None:
            h = tl.load(entropy + i, mask=supported, other=0.0)
            value -= counted(rule.entropy_coef * h, rule.entropy_coef)
            s_entropy += total(h, supported)
            if grad_entropy is not None:
                tl.store(grad_entropy + i, tl.where(supported, -rule.entropy_coef * share, 0.0), mask=inside)
        if C.level == Level.sequence:
            grad = direct
            s_chain += total(chain, supported)
        else:
            grad = direct + tl.where(passes > 0, chain, 0.0)
        tl.store(grad_logprobs + i, tl.where(supported, grad * share, 0.0), mask=inside)
        s_loss += total(value * share, supported)
        s_tokens += count_of(present)
        s_low += count_of(supported & is_low)
        s_high += count_of(supported & is_high)
        s_far += count_of(supported & is_far)
        s_k1 += total(-d, supported)
        s_k3 += total(expm1(d) - d, supported)
        s_ratio += total(ratio, supported)
        s_weight += total(weight, present & kept)
        s_kept += count_of(present & kept)
        s_odd += count_of(supported & ((value - value) != 0.0))
        s_outside += count_of(present & (referred == 0))
        largest = tl.maximum(largest, tl.max(tl.where(supported & (ratio > 0), ratio, 0.0), axis=0))

    if C.level == Level.sequence:  # the ratio of the sequence hangs on every token of it
        part = mean_passes * (s_chain / count).to(tl.float32) * share
        tl.debug_barrier()
        for start in range(begin, end, BLOCK):
            i = start + lanes
            present = tl.load(mask + i, mask=i < end, other=0) != 0
            advantage = advantage_of(advantages, row, i, present, PER_TOKEN)
            if C.shrink:
                _, _, kept = weigh(
                    logprobs, old_logprobs, rollout_logprobs, staleness, row, i, present, advantage,
                    log_weight, rejected, drifted, mean_weight, rule, C, STALE_PER_TOKEN,
                )  # fmt: skip
                present = present & kept
            supported = supported_of(logprobs, old_logprobs, i, present)
            through = part + tl.zeros_like(lanes).to(tl.float32)
            if C.term == Term.gmpo:
                d = log_ratio_of(logprobs, old_logprobs, i, supported)
                _, own_passes = own_log_ratio(d, advantage, rule, C)
                through = tl.where(own_passes, through, 0.0)
            grad = tl.load(grad_logprobs + i, mask=supported, other=0.0) + through
            tl.store(grad_logprobs + i, grad, mask=supported)

    sequences = tl.where(s_tokens > 0, 1.0, 0.0)
    store_all(partials + row * COLUMNS, (
        s_loss, s_tokens, sequences, s_low, s_high, s_far, s_k1, s_k3, s_ratio, s_entropy, s_kl, s_weight,
        s_kept, s_odd, s_outside, largest,
    ))  # fmt: skip


@triton.jit
def column(partials, rows, k, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a column in the order of the rows: BLOCK chains, then the chains."""
    lanes = tl.arange(0, BLOCK)
    chains = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        r = (start + lanes).to(tl.int64)
        chains += tl.load(partials + r * COLUMNS + k, mask=r < rows, other=0.0)
    return tl.sum(chains, axis=0)


@triton.jit(
    do_not_specialize=["rows", "denominator", "factor"], do_not_specialize_on_alignment=["partials", "values"]
)
def values_kernel(partials, rows, values, denominator, factor, BY_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        r = (start + lanes).to(tl.int64)
        ratio = tl.load(partials + r * COLUMNS + Column.largest, mask=r < rows, other=0.0)
        largest = tl.maximum(largest, ratio)
    tokens = column(partials, rows, Column.tokens, COLUMNS, BLOCK)
    sequences = column(partials, rows, Column.sequences, COLUMNS, BLOCK)
    here = sequences
    if BY_TOKEN:
        here = tokens
    below = tl.where(denominator > 0, tl.full((), denominator, tl.float64), tl.maximum(here, 1.0))
    scale = tl.full((), factor, tl.float64) / below
    store_all(values, (column(partials, rows, Column.loss, COLUMNS, BLOCK) * scale, scale))
    each = 1.0 / tl.maximum(tokens, 1.0)
    for k in tl.static_range(6):
        mean = column(partials, rows, Column.low + k, COLUMNS, BLOCK) * each
        tl.store(values + Value.clip_fraction_low + k, mean.to(tl.float32))
    tl.store(values + Value.ratio_max, tl.max(largest, axis=0).to(tl.float32))
    for k in tl.static_range(4):
        mean = column(partials, rows, Column.entropy + k, COLUMNS, BLOCK) * each
        tl.store(values + Value.entropy + k, mean.to(tl.float32))
    not_finite = column(partials, rows, Column.not_finite, COLUMNS, BLOCK)
    outside = column(partials, rows, Column.outside, COLUMNS, BLOCK)
    store_all(values + Value.tokens, (tokens, sequences, not_finite, outside))
