"""Pass B of ``sampling``: one program puts a row's records together and reads again what a filter needs.

What the statistics mean stands in rlkernel/reference/sampling.py.  A row without a filter is done after its
records; of others only groups of 64 tokens that can matter are read.
"""

import triton
import triton.language as tl

from rlkernel.calls import sampling as calls
from rlkernel.triton_ops import sampling_select_kernels as sets
from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops.logprob_kernels import LOG2E, finite_or_zero, sum_lanes
from rlkernel.triton_ops.sampling_kernels import (
    COLDEST,
    FIXED_POINT,
    HOTTEST,
    RECORD,
    Field,
    any_order_sum,
    load_entries,
    load_scalar,
    softmax_temperature,
)
from rlkernel.triton_ops.sampling_random import REDRAW, draw_below, gumbel_noise, key_of

Order, Ties = Names(calls.FILTER_ORDERS), Names(calls.RANK_TIES)
Threshold, Band = Names(calls.THRESHOLDS), Names(calls.BAND)
THRESHOLDS, BANDS = tl.constexpr(len(Threshold)), tl.constexpr(len(Band))


@triton.jit
def scales(maxima, top, per_t):
    """``exp((maxima - top) / T)``, 0 for splits that hold nothing."""
    return tl.where(maxima == float("-inf"), 0.0, tl.exp((maxima - top) * per_t))


@triton.jit
def standard_deviation(records, here):
    """Of all finite z, from the number, mean and M2 of each split."""
    count = tl.load(records + Field.finite, mask=here, other=0.0)
    mean = tl.load(records + Field.mean, mask=here, other=0.0)
    m2 = tl.load(records + Field.m2, mask=here, other=0.0)
    total = tl.maximum(tl.sum(count), 1.0)  # whole numbers: any order
    off = mean - any_order_sum(mean * count) / total
    return tl.sqrt(any_order_sum(m2 + off * off * count) / total)


@triton.jit
def least_of(thresholds, record, here, per_t):
    """The least (z - max) / T that epsilon, eta and top-a keep, each off at 0; the likeliest token has 0."""
    maxima = tl.load(record + Field.max_z, mask=here, other=float("-inf"))
    sums = tl.load(record + Field.sum_z, mask=here, other=0.0)
    top = finite_or_zero(tl.max(maxima, axis=0))
    scale = scales(maxima, top, per_t)
    s = sum_lanes(sums * scale)
    weighted = tl.load(record + Field.weighted, mask=here, other=0.0)
    weighted += tl.where(maxima == float("-inf"), 0.0, sums * ((maxima - top) * per_t))
    log_s = tl.log(s)
    entropy = log_s - sum_lanes(weighted * scale) / s
    i = tl.arange(0, 4)
    logs = tl.log(tl.load(thresholds + i, mask=i < THRESHOLDS, other=0.0).to(tl.float64))  # log(0) is -inf
    logs = tl.where(i == Threshold.eta_cutoff, tl.minimum(logs, 0.5 * logs - entropy), logs)
    return tl.minimum(tl.max(tl.where(i == Threshold.top_a, logs - log_s, logs + log_s), axis=0), 0.0)


@triton.jit
def noisiest(listed, n, x_ptr, adjusted, bitmask, V, top, t, pivot, last, high, seed, position):
    """The kept token with the largest ``(z - top) / t + noise``; the lowest of several."""
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), sets.NO_TOKEN, tl.int32)
    for start in range(0, n, sets.BATCH):
        z, tokens = sets.load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        noisy = ((z - top) / t.to(tl.float32)) + gumbel_noise(seed, position, tokens)
        noisy = tl.where(sets.is_kept(z, tokens, pivot, last, high), noisy, float("-inf"))
        here = tl.max(noisy)
        if here > best:
            winner = tl.min(tl.where(noisy == here, tokens, sets.NO_TOKEN))
            best = here
    return winner


@triton.jit
def select(
    listed, candidates, group_max, groups, x_ptr, adjusted, bitmask, V, top, c, k, p, p_on, cut,
    ORDER: tl.constexpr, N: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """``(survivors, pivot, last id of its ties, count, mass)`` of the kept set; k is V where it is off."""
    # a mass of less than half of 2**-40 is 0, and such a token in no nucleus
    by_mass = tl.where(p_on, -41.5 / c, float("-inf"))
    before = cut
    if ORDER == Order.top_k_first:  # the thresholds do not change top_p's share
        before = tl.where(p_on, float("-inf"), cut)
    bound = tl.maximum(by_mass, before)
    if k < V:
        bound = tl.maximum(bound, sets.kth_group(group_max, groups, top, k, N) - top)
    whole_mass = tl.full((), 0, tl.int64)
    if ORDER == Order.joint and p_on:  # p counts the mass of all tokens
        n = sets.list_groups(listed, group_max, groups, top, by_mass, N)
        whole_mass = sets.survey(listed, n, x_ptr, adjusted, bitmask, V, top, by_mass, c)[1]
    n = sets.list_groups(listed, group_max, groups, top, bound, N)
    count, mass, lowest = sets.survey(listed, n, x_ptr, adjusted, bitmask, V, top, bound, c)
    if ORDER != Order.joint:
        whole_mass = mass

    pivot = lowest
    last = tl.full((), sets.NO_TOKEN, tl.int32)
    cut_by_k = count > k
    if p_on | cut_by_k:
        limit = tl.full((), sets.UNLIMITED, tl.int64)
        n_from = count
        ties = count
        # first, where p counts the mass of the first k tokens: which they are
        phase = tl.where(p_on & cut_by_k, 0, 1)
        if ORDER == Order.joint:
            phase = tl.full((), 1, tl.int32)
        while phase < 2:
            if p_on & (phase == 1):
                limit = tl.ceil(p.to(tl.float64) * whole_mass.to(tl.float64)).to(tl.int64)
            pivot, n_from, n_above, m_above = sets.find_pivot(
                listed, n, x_ptr, adjusted, bitmask, V, top, c, k, limit, pivot, n_from, candidates, ROOM
            )
            ties, m = sets.kept_ties(pivot, n_from, n_above, m_above, top, c, k, limit)
            count = n_above + ties
            mass = m_above + ties * m
            whole_mass = tl.where(phase == 0, mass, whole_mass)
            phase += 1
        if count < n_from:
            last = sets.tie_id(listed, n, x_ptr, adjusted, bitmask, V, pivot, ties)
    if ORDER == Order.top_k_first and pivot - top < cut:
        count, mass, pivot = sets.survey(listed, n, x_ptr, adjusted, bitmask, V, top, cut, c)
        last = tl.full((), sets.NO_TOKEN, tl.int32)
    return n, pivot, last, count, mass


@triton.jit
def write_support(support, size, listed, n, x_ptr, adjusted, bitmask, V, pivot, last, high):
    """The kept ids, ascending."""
    written = tl.full((), 0, tl.int32)
    for start in range(0, n, sets.BATCH):
        z, tokens = sets.load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        keep = sets.is_kept(z, tokens, pivot, last, high).to(tl.int32)
        place = written + sets.sums_before(keep)
        tl.store(support + place, tokens, mask=(keep != 0) & (place < size))
        written += tl.sum(keep)


@triton.jit
def rank_of(z_token, upto, listed, group_max, groups, x_ptr, adjusted, bitmask, V, N: tl.constexpr):
    """The number of tokens with a larger z, or the same and an id of at most ``upto``."""
    n = sets.list_groups(listed, group_max, groups, None, z_token, N)
    rank = tl.full((), 0, tl.int64)
    for start in range(0, n, sets.BATCH):
        z, tokens = sets.load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        counted = (z > z_token) | ((z == z_token) & (tokens <= upto))
        rank += tl.sum(counted.to(tl.int32)).to(tl.int64)
    return rank


@triton.jit(do_not_specialize=["splits", "groups", "top_k", "support_size"])
def finish_kernel(
    logits, row_stride: tl.int64, adjusted, adjusted_stride: tl.int64, bitmask, bitmask_stride: tl.int64,
    V, splits, groups, temperatures, temperature: tl.float32, top_ks, top_k: tl.int64,
    top_ps, top_p: tl.float32, min_ps, min_p: tl.float32, sigmas, sigma: tl.float32,
    thresholds, band, seeds, positions, token_ids, skip, records, group_max,
    token_out, raw_out, tempered_out, processed_out, kept_mass_out, kept_count_out, entropy_out, rank_out,
    support_out, support_size: tl.int64, valid_out, row_max_out, log_sum_out,
    listed, candidates,
    FILTER: tl.constexpr, ORDER: tl.constexpr, TIES: tl.constexpr, GUMBEL: tl.constexpr,
    GREEDY_SOFTMAX: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if skip is not None and tl.load(skip + row):
        return
    asked = load_scalar(temperatures, temperature, row)
    greedy = asked == 0.0
    single = greedy & (not GREEDY_SOFTMAX)  # its likeliest token is its distribution
    t = softmax_temperature(asked)
    per_t = 1.0 / t
    c = (per_t * LOG2E).to(tl.float32)

    i = tl.arange(0, SPLITS)
    here = i < splits
    record = records + (row * splits + i) * RECORD
    top = tl.max(tl.load(record + Field.max_z, mask=here, other=float("-inf")), axis=0).to(tl.float32)
    sums = tl.load(record + Field.sum_z, mask=here, other=0.0)
    # whole numbers: any order
    finite = tl.sum(tl.load(record + Field.finite, mask=here, other=0.0)).to(tl.int32)
    valid = (tl.max((sums != sums).to(tl.int32)) == 0) & (finite > 0)
    # on a GPU nobody has looked at the parameters
    valid = valid & (greedy | ((asked >= COLDEST) & (asked <= HOTTEST)))
    given_k = load_scalar(top_ks, top_k, row).to(tl.int64)
    p = load_scalar(top_ps, top_p, row)
    least = load_scalar(min_ps, min_p, row)
    width = load_scalar(sigmas, sigma, row)
    valid = valid & (p > 0.0) & (p <= 1.0) & (least >= 0.0) & (least <= 1.0) & (width > 0.0) & (given_k >= -1)
    thresholds_on = False
    if thresholds is not None:
        j = tl.arange(0, 4)
        given = tl.load(thresholds + row * THRESHOLDS + j, mask=j < THRESHOLDS, other=0.0)
        valid = valid & (tl.min(((given >= 0.0) & (given <= 1.0)).to(tl.int32)) > 0)
        thresholds_on = tl.max(given) > 0.0
    band_on = False
    if band is not None:
        typical = tl.load(band + row * BANDS + Band.typical_p)
        threshold = tl.load(band + row * BANDS + Band.xtc_threshold)
        valid = valid & (typical > 0.0) & (typical <= 1.0) & (threshold > 0.0) & (threshold <= 1.0)
        band_on = (typical < 1.0) | (threshold < 1.0)

    # the kept set first: what follows would only take registers from it
    x_ptr = logits
    if FILTER or rank_out is not None:
        x_ptr += row * row_stride
        listed += row * groups
        group_max += row * groups
        if adjusted is not None:
            adjusted += row * adjusted_stride
        if bitmask is not None:
            bitmask += row * bitmask_stride
    kept_count = tl.where(greedy, 1, finite)
    restricted = tl.full((), False, tl.int1)  # processed is not tempered
    log_kept = tl.full((), 0.0, tl.float64)
    mass = tl.full((), 0, tl.int64)
    n = tl.full((), 0, tl.int32)
    pivot = top
    last = tl.full((), -1, tl.int32)
    high = None if band is None else top
    if FILTER:
        k_on = (given_k >= 1) & (given_k < V)
        k = tl.where(k_on, given_k, V).to(tl.int32)
        p_on = p < 1.0
        filtered = k_on | p_on | (least > 0.0) | (width < float("inf"))
        if bitmask is not None:
            filtered = filtered | (finite < V)
        filtered = filtered | thresholds_on | band_on
        if filtered & valid & (not greedy):
            cut = tl.full((), float("-inf"), tl.float32)
            if least > 0.0:
                cut = (t * tl.log(least.to(tl.float64))).to(tl.float32)
            if width < float("inf"):
                deviation = standard_deviation(record, here)
                cut = tl.maximum(cut, (-width.to(tl.float64) * deviation).to(tl.float32))
            if thresholds is not None and thresholds_on:
                bound = t * least_of(thresholds + row * THRESHOLDS, record, here, per_t)
                cut = tl.maximum(cut, bound.to(tl.float32))
            n, pivot, last, kept_count, mass = select(
                listed, candidates + row * ROOM, group_max, groups, x_ptr, adjusted, bitmask, V, top, c, k,
                p, p_on, cut, ORDER, GROUPS, ROOM,
            )  # fmt: skip
            if band is not None and band_on:
                pivot, last, high, kept_count, mass = sets.narrow(
                    listed, n, x_ptr, adjusted, bitmask, V, top, t, c, pivot, last, kept_count, mass, typical,
                    threshold,
                )  # fmt: skip
            restricted = kept_count < V
            log_kept = tl.log(mass.to(tl.float64) * (1.0 / FIXED_POINT))

    maxima = tl.load(record + Field.max_z, mask=here, other=float("-inf"))
    sums = tl.load(record + Field.sum_z, mask=here, other=0.0)
    top64 = tl.max(maxima, axis=0)
    safe = finite_or_zero(top64)
    scale = scales(maxima, safe, per_t)
    shift = (maxima - safe) * per_t
    s = sum_lanes(sums * scale)
    log_s = tl.log(s)
    first_of_max = tl.where(maxima == top64, tl.load(record + Field.argmax, mask=here, other=0.0), V)
    argmax = tl.min(first_of_max).to(tl.int32)
    key = tl.load(record + Field.key, mask=here, other=float("-inf"))
    score = tl.where((key == float("inf")) | (key == float("-inf")), key, key + shift)
    best = tl.max(score, axis=0)
    chosen = i == tl.min(tl.where(score == best, i, SPLITS - 1))
    drawn = tl.load(record + Field.token, mask=here, other=0.0)
    z_drawn = tl.load(record + Field.token_z, mask=here, other=0.0)
    x_drawn = tl.load(record + Field.token_x, mask=here, other=0.0)
    token = tl.sum(tl.where(chosen, drawn, 0.0)).to(tl.int32)
    z_token = tl.sum(tl.where(chosen, z_drawn, 0.0)).to(tl.float32)
    x_token = tl.sum(tl.where(chosen, x_drawn, 0.0)).to(tl.float32)
    outside = False
    if token_ids is not None:
        outside = best != float("inf")
        z_token = tl.where(outside, float("nan"), z_token)
        x_token = tl.where(outside, float("nan"), x_token)

    excluded = single & (token != argmax)  # from the kept set
    if FILTER and restricted:
        excluded = not sets.is_kept(z_token, token, pivot, last, high)
        if token_ids is None and excluded:  # one draw over what is kept
            seed, position = key_of(seeds, positions, row)
            if GUMBEL:
                token = noisiest(
                    listed, n, x_ptr, adjusted, bitmask, V, top, t, pivot, last, high, seed, position
                )
            else:
                below = draw_below(mass, REDRAW, seed, position)
                token = sets.token_at_mass(
                    listed, n, x_ptr, adjusted, bitmask, V, top, c, pivot, last, high, below
                )
            x_token, z_token = load_entries(x_ptr, adjusted, bitmask, token, token < V, 0)
            excluded = tl.full((), False, tl.int1)

    above = (z_token.to(tl.float64) - top.to(tl.float64)) * per_t
    tempered = above - log_s
    processed = tl.where(restricted, above - log_kept, tempered)
    processed = tl.where(excluded, float("-inf"), tl.where(single, 0.0, processed))
    if token_ids is None:
        tl.store(token_out + row, tl.where(valid, token, -1).to(tl.int64))
    else:
        processed = tl.where(outside, float("nan"), processed)
        tl.store(token_out + row, tl.load(token_ids + row))
    kept_mass = tl.where(restricted | greedy, tl.exp(log_kept - log_s), 1.0)
    tl.store(valid_out + row, valid)
    if row_max_out is not None:
        tl.store(row_max_out + row, tl.where(valid, top64, float("nan")).to(tl.float32))
        tl.store(log_sum_out + row, tl.where(valid, log_s, float("nan")).to(tl.float32))
    tl.store(tempered_out + row, tl.where(valid, tempered, float("nan")).to(tl.float32))
    tl.store(processed_out + row, tl.where(valid, processed, float("nan")).to(tl.float32))
    tl.store(kept_mass_out + row, tl.where(valid, kept_mass, float("nan")).to(tl.float32))
    tl.store(kept_count_out + row, tl.where(valid, kept_count, 0).to(tl.int64))
    if entropy_out is not None:
        weighted = tl.load(record + Field.weighted, mask=here, other=0.0)
        weighted += tl.where(maxima == float("-inf"), 0.0, sums * shift)
        row_entropy = log_s - sum_lanes(weighted * scale) / s
        tl.store(entropy_out + row, tl.where(valid, row_entropy, float("nan")).to(tl.float32))
    if raw_out is not None:
        maxima_x = tl.load(record + Field.max_x, mask=here, other=float("-inf"))
        top_x = finite_or_zero(tl.max(maxima_x, axis=0))
        sums_x = tl.load(record + Field.sum_x, mask=here, other=0.0)
        log_sum_x = tl.log(sum_lanes(sums_x * scales(maxima_x, top_x, 1.0)))
        raw = (x_token.to(tl.float64) - top_x) - log_sum_x
        tl.store(raw_out + row, tl.where(valid, raw, float("nan")).to(tl.float32))
    if support_out is not None:
        support_out += row * support_size
        to_list = tl.where(valid & (restricted | greedy), kept_count, 0)
        used = tl.where(to_list <= support_size, to_list, 0)
        unused = tl.where(greedy, 0, used)  # a greedy row is the set of its likeliest token
        for start in range(0, support_size, 256):
            place = start + tl.arange(0, 256)
            fill = tl.where(place < used, argmax, -1).to(tl.int32)
            tl.store(support_out + place, fill, mask=(place >= unused) & (place < support_size))
        if FILTER and restricted & (used > 0):
            write_support(
                support_out, support_size, listed, n, x_ptr, adjusted, bitmask, V, pivot, last, high
            )
    if rank_out is not None:
        rank = tl.full((), 0, tl.int64)
        if valid & (not outside):
            upto = token
            if TIES != Ties.first:
                upto = tl.full((), V - 1, tl.int32)
            if TIES == Ties.kept:
                if single & (not excluded):
                    upto = token
                if restricted & (not excluded) & (z_token == pivot):
                    upto = tl.minimum(last, upto)
            rank = rank_of(z_token, upto, listed, group_max, groups, x_ptr, adjusted, bitmask, V, GROUPS)
        tl.store(rank_out + row, rank)
