"""The Triton kernels of ``preference_loss``.

Sums, and what follows from them, are fp64.  Blocks have a fixed size, so that the order of a sum follows
from the place in the sequence.  Alignment decides Triton's layouts, and with them that order: nothing is
specialised by it.
"""

import triton
import triton.language as tl

from rlkernel.calls.preference_loss import PAIR_METRICS, SEQUENCE_SUMS
from rlkernel.triton_ops._names import Names, store_all
from rlkernel.triton_ops.policy_loss_terms import bounds
from rlkernel.triton_ops.preference_loss_terms import Term, pair_term, score, sigmoid, smoothed, softplus

Sum = Names(SEQUENCE_SUMS)
COLUMNS = tl.constexpr(len(Sum))
Metric = Names(PAIR_METRICS)
Running = Names(("mean", "batches"))  # bco_pair's state
TENSORS = (
    "logprobs", "ref_logprobs", "mask", "nll_mask", "log_sum_sq_probs", "cu_seqlens", "stats", "labels",
    "kl", "order", "items", "nll_items", "running_delta", "loss", "metrics", "slopes", "rewards", "logps",
    "new_delta", "grad_loss", "grad",
)  # fmt: skip


@triton.jit
def count_of(mask, begin, end, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros((), tl.int64)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        count += tl.sum((tl.load(mask + i, mask=i < end, other=0) != 0).to(tl.int64), axis=0)
    return count


@triton.jit
def total(x, present):
    return tl.sum(tl.where(present, x, 0.0), axis=0)


@triton.jit(do_not_specialize=["length", "half"], do_not_specialize_on_alignment=TENSORS)
def sums_kernel(
    logprobs, ref_logprobs, mask, nll_mask, log_sum_sq_probs, cu_seqlens, stats, length, half,
    ld_alpha: tl.float64,
    REF_PER_TOKEN: tl.constexpr, LENGTH_DESENSITISED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    lanes = tl.arange(0, BLOCK)
    cutoff = end + tl.zeros((), tl.int64)
    if LENGTH_DESENSITISED:
        other = tl.where(row < half, row + half, row - half)
        other_begin, other_end = bounds(cu_seqlens, other, length)
        shared = count_of(mask, other_begin, other_end, BLOCK)
        if shared < count_of(mask, begin, end, BLOCK):
            before = tl.zeros((), tl.int64)
            cutoff = begin + tl.zeros((), tl.int64)
            for start in range(begin, end, BLOCK):
                i = start + lanes
                present = tl.load(mask + i, mask=i < end, other=0) != 0
                rank = before + tl.cumsum(present.to(tl.int64), axis=0)
                cutoff = tl.maximum(cutoff, tl.max(tl.where(present & (rank == shared), i + 1, 0), axis=0))
                before += tl.sum(present.to(tl.int64), axis=0)
    zero = tl.zeros((), tl.float64)
    s_logps, s_ref, s_tokens, s_nll, s_nll_tokens, s_aligned = zero, zero, zero, zero, zero, zero
    for start in range(begin, end, BLOCK):
        i = start + lanes
        present = tl.load(mask + i, mask=i < end, other=0) != 0
        likely = present
        if nll_mask is not None:
            likely = tl.load(nll_mask + i, mask=i < end, other=0) != 0
        x = tl.load(logprobs + i, mask=present | likely, other=0.0).to(tl.float64)
        weight = tl.full((BLOCK,), 1.0, tl.float64)
        if LENGTH_DESENSITISED:
            weight = tl.where(i < cutoff, weight, ld_alpha)
        s_logps += total(x * weight, present)
        s_tokens += total(weight * 0.0 + 1.0, present)
        s_nll += total(x, likely)
        s_nll_tokens += total(weight * 0.0 + 1.0, likely)
        if REF_PER_TOKEN:
            s_ref += total(
                tl.load(ref_logprobs + i, mask=present, other=0.0).to(tl.float64) * weight, present
            )
        if log_sum_sq_probs is not None:
            s_aligned += total(
                x - tl.load(log_sum_sq_probs + i, mask=present, other=0.0).to(tl.float64), present
            )
    if (ref_logprobs is not None) & (not REF_PER_TOKEN):
        s_ref += tl.load(ref_logprobs + row).to(tl.float64)
    store_all(
        stats + row * COLUMNS, (s_logps, s_ref, s_tokens, s_nll, s_nll_tokens, s_aligned, cutoff - begin)
    )


@triton.jit
def column(stats, row, k, inside):
    return tl.load(stats + row * COLUMNS + k, mask=inside, other=0.0)


@triton.jit
def ranked(stats, order, k, half, inside, e, beta, TERM: tl.constexpr):
    """The loss of the ranks k, its derivative, the two pairs that meet there, and whether each counts."""
    a = tl.load(order + (TERM - Term.aot) * 2 * half + k, mask=inside, other=0)
    b = tl.load(order + ((TERM - Term.aot) * 2 + 1) * half + k, mask=inside, other=0)
    if TERM == Term.aot:
        d = column(stats, a, Sum.logps, inside) - column(stats, a + half, Sum.logps, inside)
        d -= column(stats, b, Sum.ref_logps, inside) - column(stats, b + half, Sum.ref_logps, inside)
    else:
        d = column(stats, a, Sum.logps, inside) - column(stats, a, Sum.ref_logps, inside)
        d -= column(stats, b + half, Sum.logps, inside) - column(stats, b + half, Sum.ref_logps, inside)
    a_counts = (column(stats, a, Sum.tokens, inside) > 0) & (column(stats, a + half, Sum.tokens, inside) > 0)
    b_counts = (column(stats, b, Sum.tokens, inside) > 0) & (column(stats, b + half, Sum.tokens, inside) > 0)
    value, slope = smoothed(beta * d, e)
    either = a_counts | b_counts
    value, slope = tl.where(either, value, 0.0), tl.where(either, slope * beta, 0.0)
    if TERM == Term.aot:
        return value, slope, a, a, a_counts, a_counts
    else:
        return value, slope, a, b, a_counts, b_counts


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=TENSORS)
def loss_kernel(
    stats, rows, labels, kl, order, items, nll_items, running_delta, loss, metrics, slopes, rewards, logps,
    new_delta, weights, smoothing, beta: tl.float64, gamma: tl.float64, tau: tl.float64, exponent: tl.float64,
    nll_coef: tl.float64, desirable: tl.float64, undesirable: tl.float64, factor: tl.float64,
    item_count: tl.float64, nll_item_count: tl.float64, TERMS: tl.constexpr, N: tl.constexpr,
    PER_TOKEN: tl.constexpr, WEIGHTING: tl.constexpr, DIVERGENCE: tl.constexpr, KL_PER_ROW: tl.constexpr,
    LIKELY: tl.constexpr, ODDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    one = tl.full((), 1.0, tl.float64)  # what multiplies numbers of a tuple, which come as fp32
    half = rows // 2
    slots = rows
    if labels is None:
        slots = half
    zeros = tl.zeros((BLOCK,), tl.float64)
    v_pairs, v_reward, v_weight, v_nll, v_nll_tokens = zeros, zeros, zeros, zeros, zeros
    for start in range(0, slots, BLOCK):
        k = start + lanes
        inside = k < slots
        tokens = column(stats, k, Sum.tokens, inside)
        counted = inside & (tokens > 0)
        chosen = inside
        weight = zeros + 1.0
        if labels is None:
            other = column(stats, k + half, Sum.tokens, inside)
            counted = counted & (other > 0)
            if WEIGHTING:
                weight = tl.exp(column(stats, k, Sum.aligned, inside) / tl.maximum(tokens, 1.0))
                weight *= tl.exp(column(stats, k + half, Sum.aligned, inside) / tl.maximum(other, 1.0))
            if running_delta is not None:
                if PER_TOKEN:
                    r = column(stats, k, Sum.logps, inside) / tl.maximum(tokens, 1.0)
                    r += column(stats, k + half, Sum.logps, inside) / tl.maximum(other, 1.0)
                else:
                    r = column(stats, k, Sum.logps, inside) - column(stats, k, Sum.ref_logps, inside)
                    r += column(stats, k + half, Sum.logps, inside) - column(
                        stats, k + half, Sum.ref_logps, inside
                    )
                v_reward += tl.where(counted, beta * r, 0.0)
        else:
            chosen = tl.load(labels + k, mask=inside, other=0) != 0
        nll_tokens = tl.where(chosen, column(stats, k, Sum.nll_tokens, inside), 0.0)
        v_nll += tl.where(nll_tokens > 0, column(stats, k, Sum.nll, inside), 0.0)
        v_nll_tokens += nll_tokens
        v_pairs += tl.where(counted, 1.0, 0.0)
        v_weight += tl.where(counted, weight, 0.0)
    number, nll = tl.sum(v_pairs, axis=0), tl.sum(v_nll, axis=0)
    nll_here = tl.maximum(tl.sum(v_nll_tokens, axis=0), 1.0)
    here = tl.maximum(number, 1.0)
    delta = tl.zeros((), tl.float64)
    if running_delta is not None:
        mean = tl.load(running_delta + Running.mean).to(tl.float64)
        batches = tl.load(running_delta + Running.batches).to(tl.float64)
        delta = mean + tl.where(
            number > 0, (tl.sum(v_reward, axis=0) / (2.0 * here) - mean) / (batches + 1.0), 0.0
        )
        store_all(new_delta, (delta, batches + tl.where(number > 0, 1.0, 0.0)))
    divisor = tl.where(item_count > 0, item_count, here)
    if items is not None:
        divisor = tl.load(items)
    nll_divisor = tl.where(nll_item_count > 0, nll_item_count, nll_here)
    if nll_items is not None:
        nll_divisor = tl.load(nll_items)
    scale = factor / divisor

    v_loss, v_reward_c, v_reward_r, v_better, v_logps_c, v_logps_r = zeros, zeros, zeros, zeros, zeros, zeros
    v_ratio, v_odds, v_tokens_c, v_tokens_r, v_odd, v_kl, v_chosen, v_rejected = (
        zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros,
    )  # fmt: skip
    for start in range(0, slots, BLOCK):
        k = start + lanes
        inside = k < slots
        tokens = column(stats, k, Sum.tokens, inside)
        per = 1.0 / tl.maximum(tokens, 1.0)
        first = column(stats, k, Sum.logps, inside)
        x = first - column(stats, k, Sum.ref_logps, inside)
        shown, reward = first, beta * x
        if PER_TOKEN:
            shown = first * per
            reward = beta * shown
        present = inside & (tokens > 0)
        shown, reward = tl.where(present, shown, 0.0), tl.where(present, reward, 0.0)
        tl.store(rewards + k, reward.to(tl.float32), mask=inside)
        tl.store(logps + k, shown.to(tl.float32), mask=inside)
        value = zeros
        if labels is None:
            other = column(stats, k + half, Sum.tokens, inside)
            per_r = 1.0 / tl.maximum(other, 1.0)
            second = column(stats, k + half, Sum.logps, inside)
            y = second - column(stats, k + half, Sum.ref_logps, inside)
            shown_r, reward_r = second, beta * y
            if PER_TOKEN:
                shown_r = second * per_r
                reward_r = beta * shown_r
            present_r = inside & (other > 0)
            shown_r, reward_r = tl.where(present_r, shown_r, 0.0), tl.where(present_r, reward_r, 0.0)
            tl.store(rewards + half + k, reward_r.to(tl.float32), mask=inside)
            tl.store(logps + half + k, shown_r.to(tl.float32), mask=inside)
            counted = present & present_r
            weight = zeros + 1.0
            if WEIGHTING:
                weight = tl.exp(column(stats, k, Sum.aligned, inside) * per) * tl.exp(
                    column(stats, k + half, Sum.aligned, inside) * per_r
                )
            # what does not count is replaced by what has a value in every loss
            mean_c, mean_r = tl.where(counted, first * per, -1.0), tl.where(counted, second * per_r, -1.0)
            score_x, slope_x = score(x, exponent, DIVERGENCE)
            score_y, slope_y = score(y, exponent, DIVERGENCE)
            by_c, by_r, log_odds = zeros, zeros, zeros
            for i in tl.static_range(N):
                e = one * smoothing[i]
                w = one * weights[i]
                if (TERMS[i] != Term.aot) & (TERMS[i] != Term.aot_unpaired):
                    term, term_c, term_r, odds = pair_term(
                        x, y, score_x, slope_x, score_y, slope_y, mean_c, mean_r, per, per_r, delta, e,
                        beta, gamma, tau, exponent, TERMS[i], DIVERGENCE,
                    )  # fmt: skip
                    value += w * term
                    by_c += w * term_c
                    by_r += w * term_r
                    if TERMS[i] == Term.orpo:
                        log_odds = odds
            value = tl.where(counted, value * weight, 0.0)
            for i in tl.static_range(N):
                if (TERMS[i] == Term.aot) | (TERMS[i] == Term.aot_unpaired):
                    e = one * smoothing[i]
                    term, _, _, _, _, _ = ranked(stats, order, k, half, inside, e, beta, TERMS[i])
                    value += (one * weights[i]) * term
            tl.store(slopes + k, tl.where(counted, by_c * weight * scale, 0.0), mask=inside)
            tl.store(slopes + half + k, tl.where(counted, by_r * weight * scale, 0.0), mask=inside)
            v_reward_c += tl.where(counted, reward, 0.0)
            v_reward_r += tl.where(counted, reward_r, 0.0)
            v_logps_c += tl.where(counted, shown, 0.0)
            v_logps_r += tl.where(counted, shown_r, 0.0)
            v_better += tl.where(counted & (reward > reward_r), 1.0, 0.0)
            v_ratio -= tl.where(counted, softplus(-log_odds), 0.0)
            v_odds += tl.where(counted, log_odds, 0.0)
            v_chosen += tl.where(counted, 1.0, 0.0)
            v_rejected += tl.where(counted, 1.0, 0.0)
            v_tokens_c += tokens
            v_tokens_r += other
        else:
            chosen = tl.load(labels + k, mask=inside, other=0) != 0
            divergence = zeros
            if kl is not None:
                if KL_PER_ROW:
                    divergence += tl.load(kl + k, mask=inside, other=0.0).to(tl.float64)
                else:
                    divergence += tl.where(inside, tl.load(kl).to(tl.float64), 0.0)
            sign = tl.where(chosen, 1.0, -1.0).to(tl.float64)
            slope = zeros
            for i in tl.static_range(N):
                shifted = x
                if TERMS[i] == Term.kto:
                    shifted = x - divergence
                u = beta * shifted * sign
                w = (one * weights[i]) * tl.where(chosen, desirable, undesirable)
                value += w * sigmoid(-u)
                slope -= w * sigmoid(-u) * sigmoid(u) * beta * sign
            value = tl.where(present, value, 0.0)
            tl.store(slopes + k, tl.where(present, slope * scale, 0.0), mask=inside)
            v_reward_c += tl.where(present & chosen, reward, 0.0)
            v_reward_r += tl.where(present & (chosen == 0), reward, 0.0)
            v_logps_c += tl.where(present & chosen, shown, 0.0)
            v_logps_r += tl.where(present & (chosen == 0), shown, 0.0)
            v_chosen += tl.where(present & chosen, 1.0, 0.0)
            v_rejected += tl.where(present & (chosen == 0), 1.0, 0.0)
            v_tokens_c += tl.where(chosen, tokens, 0.0)
            v_tokens_r += tl.where(chosen, 0.0, tokens)
            v_kl += tl.where(present, divergence, 0.0)
        v_loss += value
        v_odd += tl.where((value - value) != 0.0, 1.0, 0.0)

    sft = tl.zeros((), tl.float64)
    for i in tl.static_range(N):
        if TERMS[i] == Term.sft:
            sft += one * weights[i]
        if (TERMS[i] == Term.aot) | (TERMS[i] == Term.aot_unpaired):
            tl.debug_barrier()  # the slopes so far are written: a rank adds to those of another pair
            for start in range(0, half, BLOCK):
                k = start + lanes
                inside = k < half
                e = one * smoothing[i]
                w = (one * weights[i]) * scale
                _, slope, a, b, a_counts, b_counts = ranked(stats, order, k, half, inside, e, beta, TERMS[i])
                at = inside & a_counts
                tl.store(slopes + a, tl.load(slopes + a, mask=at, other=0.0) + slope * w, mask=at)
                at, rejected = inside & b_counts, slopes + half + b
                tl.store(rejected, tl.load(rejected, mask=at, other=0.0) - slope * w, mask=at)

    mean_weight = tl.where(number > 0, tl.sum(v_weight, axis=0) / here, 1.0)
    preference = tl.sum(v_loss, axis=0) / divisor
    whole = preference
    nll_slope = tl.zeros((), tl.float64)
    if LIKELY:
        coefficient = nll_coef + sft * mean_weight
        whole = preference - coefficient * nll / nll_divisor
        nll_slope = -coefficient * factor / nll_divisor
    tl.store(loss, (whole * factor).to(tl.float32))
    tl.store(slopes + rows, nll_slope)
    n_chosen, n_rejected = (
        tl.maximum(tl.sum(v_chosen, axis=0), 1.0),
        tl.maximum(tl.sum(v_rejected, axis=0), 1.0),
    )
    reward_c, reward_r = tl.sum(v_reward_c, axis=0) / n_chosen, tl.sum(v_reward_r, axis=0) / n_rejected
    store_all(metrics, (
        reward_c, reward_r, reward_c - reward_r, tl.sum(v_better, axis=0) / here,
        tl.sum(v_logps_c, axis=0) / n_chosen, tl.sum(v_logps_r, axis=0) / n_rejected, preference,
        -nll / nll_here,
    ))  # fmt: skip
    ratio, odds_mean = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if ODDS:
        ratio, odds_mean = tl.sum(v_ratio, axis=0) / here, tl.sum(v_odds, axis=0) / here
    kl_mean = tl.sum(v_kl, axis=0) / here
    if (kl is not None) & (not KL_PER_ROW):
        kl_mean = tl.load(kl).to(tl.float64)
    store_all(metrics + Metric.log_odds_ratio, (
        ratio, odds_mean, mean_weight, kl_mean, number, tl.sum(v_tokens_c, axis=0),
        tl.sum(v_tokens_r, axis=0), tl.sum(v_odd, axis=0),
    ))  # fmt: skip


@triton.jit(do_not_specialize=["rows", "length"], do_not_specialize_on_alignment=TENSORS)
def gradient_kernel(
    grad_loss, slopes, stats, mask, nll_mask, labels, cu_seqlens, rows, length, ld_alpha: tl.float64, grad,
    LENGTH_DESENSITISED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    lanes = tl.arange(0, BLOCK)
    upstream = tl.load(grad_loss).to(tl.float64)
    head = tl.load(slopes + row) * upstream
    if labels is None:
        chosen = row < rows // 2
    else:
        chosen = tl.load(labels + row) != 0
    nll = tl.where(chosen, tl.load(slopes + rows) * upstream, 0.0)
    cutoff = end
    if LENGTH_DESENSITISED:
        cutoff = begin + tl.load(stats + row * COLUMNS + Sum.cutoff).to(tl.int64)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        present = tl.load(mask + i, mask=i < end, other=0) != 0
        likely = present
        if nll_mask is not None:
            likely = tl.load(nll_mask + i, mask=i < end, other=0) != 0
        own = tl.zeros((BLOCK,), tl.float64) + head
        if LENGTH_DESENSITISED:
            own = tl.where(i < cutoff, own, own * ld_alpha)
        value = tl.where(present, own, 0.0) + tl.where(likely, nll, 0.0)
        tl.store(grad + i, value.to(tl.float32), mask=i < end)
    if (cu_seqlens is not None) & (row == rows - 1):  # what lies behind the last sequence
        for start in range(end, length, BLOCK):
            i = start + lanes
            tl.store(grad + i, tl.zeros((BLOCK,), tl.float32), mask=i < length)
