"""Pass A of ``sampling``: one program reads 4096 tokens of a row once and leaves a record of them.

What the fields of a record mean stands in csrc/include/rlkernel/sampling/arguments.h.  A row's bits depend on
its values only: floats are summed as a binary tree over adjacent tokens, written out, so that neither the
layout (which follows from the alignment and the dtype) nor the compiler has a say; everything else is
integers.
"""

import triton
import triton.language as tl

from rlkernel.calls import sampling as calls
from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops.logprob_kernels import FIXED_POINT, LN2, LOG2E, finite_or_zero, load_block, sum_lanes
from rlkernel.triton_ops.sampling_random import INSIDE, draw_below, group_noise, gumbel_noise, key_of

SPLIT, GROUP = tl.constexpr(calls.SPLIT), tl.constexpr(calls.GROUP)
Field = Names(calls.RECORD)
RECORD = tl.constexpr(len(Field))
COLDEST = tl.constexpr(2.0**-126)  # normal numbers
HOTTEST = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


@triton.jit
def pair_sums(x, N: tl.constexpr, LEVELS: tl.constexpr):
    """The N entries of x, summed by 2**LEVELS adjacent ones: first pairs, then pairs of pairs, ..."""
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (N >> (level + 1), 2)))
        x = left + right
    return x


@triton.jit
def any_order_sum(x):
    """The sum of at most 4096 fp64 numbers, as multiples of 2**-50 of the largest: in any order the same."""
    largest = tl.max(tl.abs(x))
    unit = tl.where(largest > 0.0, largest, 1.0)
    return tl.sum((x * (2.0**50 / unit)).to(tl.int64)).to(tl.float64) * (unit * 2.0**-50)


@triton.jit
def load_scalar(each, of_all, row):
    """The row's value of an argument that is a tensor or one number."""
    if each is not None:
        value = tl.load(each + row)
    else:
        value = of_all
    return value


@triton.jit
def softmax_temperature(t):
    """The row's T in fp64; 1 for a greedy row and for a T that is none, so that no number overflows."""
    return tl.where((t >= COLDEST) & (t <= HOTTEST), t, 1.0).to(tl.float64)


@triton.jit
def masses(e):
    """e of [0, 1] in units of 2**-40, rounded to even; in fp32, whose numbers from 2**23 on are whole."""
    x = e * FIXED_POINT
    return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x).to(tl.int64)


@triton.jit
def load_entries(x_ptr, adjusted, bitmask, columns, inside, first):
    """``(x, z)`` at some columns of a row whose column 0 is token ``first``, -inf outside."""
    x = tl.load(x_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
    z = x
    if adjusted is not None:
        z = tl.load(adjusted + columns, mask=inside, other=float("-inf"))
    if bitmask is not None:
        token = first + columns
        word = tl.load(bitmask + (token >> 5), mask=inside, other=0)
        z = tl.where(((word >> (token & 31)) & 1) != 0, z, float("-inf"))
    return x, z


@triton.jit
def exp_sum(z, top, c):
    """``exp2((z - top) * c)`` of a split, its sums by groups of 64, and their sum (NaN where one is)."""
    e = tl.exp2((z - top) * c)
    mass = pair_sums(e, SPLIT, 6)
    not_a_number = tl.max((mass != mass).to(tl.int32)) > 0  # an integer cannot carry it
    return e, mass, tl.where(not_a_number, float("nan"), sum_lanes(mass))


@triton.jit(do_not_specialize=["vocab_start", "tile_splits", "splits", "groups"])
def statistics_kernel(
    tile, row_stride: tl.int64, adjusted, adjusted_stride: tl.int64, bitmask, bitmask_stride: tl.int64,
    V, vocab_start, tile_splits, splits: tl.int64, groups: tl.int64, temperatures, temperature: tl.float32,
    seeds, positions, token_ids, skip, records, group_max,
    RAW: tl.constexpr, ENTROPY: tl.constexpr, SIGMA: tl.constexpr, GUMBEL: tl.constexpr,
    SCATTERED: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tile_splits).to(tl.int64)
    if skip is not None and tl.load(skip + row):
        return
    start = (tl.program_id(0) % tile_splits) * SPLIT
    first = vocab_start + start
    split = (first // SPLIT).to(tl.int64)
    t = load_scalar(temperatures, temperature, row).to(tl.float64)
    drawn = (t >= COLDEST) & (t <= HOTTEST)  # else greedy, or no temperature and no valid row
    t = tl.where(drawn, t, 1.0)
    c = (1.0 / t * LOG2E).to(tl.float32)

    x_ptr = tile + row * row_stride
    x = load_block(x_ptr, start, V, SCATTERED, LANES, VEC).to(tl.float32)
    z = x
    bad = False
    if adjusted is not None:
        adjusted += row * adjusted_stride
        z = load_block(adjusted, start, V, SCATTERED, LANES, VEC)
    if bitmask is not None:
        bitmask += row * bitmask_stride
        lanes = tl.arange(0, LANES) * VEC
        words = tl.load(bitmask + (first + lanes) // 32, mask=start + lanes < V, other=0)
        bits = words[:, None] >> ((lanes % 32)[:, None] + tl.arange(0, VEC)[None, :])
        z = tl.where((bits & 1) != 0, z, float("-inf"))
    if adjusted is not None or bitmask is not None:  # else the sum of z tells
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32)) > 0

    lane_max = tl.max(z, axis=1)
    maxima = tl.max(tl.reshape(lane_max, (SPLIT // GROUP, LANES * GROUP // SPLIT)), axis=1)
    split_max = tl.max(maxima, axis=0)
    top = finite_or_zero(split_max)
    e, mass, total = exp_sum(z, top, c)
    total = tl.where(bad, float("nan"), total)
    finite = tl.sum((z > float("-inf")).to(tl.int32))

    i = tl.arange(0, 64)  # groups of the split, or tokens of a group
    group_ids = first // GROUP + i
    record = records + (row * splits + split) * RECORD
    if group_max is not None:
        tl.store(group_max + row * groups + group_ids, maxima, mask=group_ids < groups)
    tl.store(record + Field.max_z, split_max.to(tl.float64))
    tl.store(record + Field.sum_z, total)
    tl.store(record + Field.finite, finite.to(tl.float64))
    if ENTROPY:
        d = tl.maximum((z - top) * c, -150.0)  # 2**-150 is 0 in fp32, and 0 * -inf would be NaN
        tl.store(record + Field.weighted, sum_lanes(pair_sums(e * d, SPLIT, 6)) * LN2)
    else:
        tl.store(record + Field.weighted, 0.0)
    mean = tl.full((), 0.0, tl.float64)
    m2 = mean
    if SIGMA:
        wide = z.to(tl.float64)
        known = z > float("-inf")
        count = tl.maximum(finite, 1).to(tl.float64)
        mean = any_order_sum(tl.where(known, wide, 0.0)) / count
        off = tl.where(known, wide - mean, 0.0)
        m2 = any_order_sum(off * off)
    tl.store(record + Field.mean, mean)
    tl.store(record + Field.m2, m2)
    max_x = split_max
    total_x = total
    if RAW and ((adjusted is not None or bitmask is not None) or t != 1.0):
        max_x = tl.max(tl.max(x, axis=1), axis=0)
        total_x = exp_sum(x, finite_or_zero(max_x), LOG2E)[2]
    tl.store(record + Field.max_x, max_x.to(tl.float64))
    tl.store(record + Field.sum_x, total_x)

    # the likeliest token: lowest id within the lowest group
    highest = tl.minimum(tl.min(tl.where(maxima == split_max, i, 64)), 63)
    columns = start + highest * GROUP + i
    x_group, z_group = load_entries(x_ptr, adjusted, bitmask, columns, columns < V, vocab_start)
    index = tl.minimum(tl.min(tl.where(z_group == split_max, i, 64)), 63)
    likeliest = start + highest * GROUP + index
    tl.store(record + Field.argmax, (vocab_start + likeliest).to(tl.float64))

    if token_ids is not None:
        forced = tl.load(token_ids + row) - vocab_start
        here = (forced >= start) & (forced < tl.minimum(start + SPLIT, V))
        column = tl.where(here, forced, start)
        key = tl.where(here, float("inf"), float("-inf"))
    elif GUMBEL:
        seed, position = key_of(seeds, positions, row)
        offsets = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
        noisy = ((z - top) / t.to(tl.float32)) + gumbel_noise(seed, position, first + offsets)
        noisy = tl.where(z > float("-inf"), noisy, float("-inf"))
        best = tl.max(tl.max(noisy, axis=1), axis=0)
        column = start + tl.minimum(tl.min(tl.where(noisy == best, offsets, SPLIT)), SPLIT - 1)
        key = best
    else:
        seed, position = key_of(seeds, positions, row)
        keys = tl.log(mass) + group_noise(seed, position, group_ids)
        key = tl.max(keys)
        group = tl.minimum(tl.min(tl.where(keys == key, i, 64)), 63)
        columns = start + group * GROUP + i
        _, z_group = load_entries(x_ptr, adjusted, bitmask, columns, columns < V, vocab_start)
        group_top = finite_or_zero(tl.max(z_group))
        sums = tl.cumsum(masses(tl.exp2((z_group - group_top) * c)), axis=0)
        below = draw_below(tl.max(sums), INSIDE, seed, position)
        column = start + group * GROUP + tl.minimum(tl.sum((sums <= below).to(tl.int32)), 63)
    if token_ids is None:  # among greedy splits the one with the largest z wins: all have the same key
        column = tl.where(drawn, column, likeliest)
        key = tl.where(drawn | (split_max == float("-inf")), key, 0.0)
    x_token, z_token = load_entries(x_ptr, adjusted, bitmask, column, column < V, vocab_start)
    tl.store(record + Field.key, key.to(tl.float64))
    tl.store(record + Field.token, (vocab_start + column).to(tl.float64))
    tl.store(record + Field.token_z, z_token.to(tl.float64))
    tl.store(record + Field.token_x, x_token.to(tl.float64))
