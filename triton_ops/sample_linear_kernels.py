"""The Triton kernels of the fused ``sample_linear``: a tile of logits becomes a draw in its registers.

What a tile of the vocabulary leaves of each row are the planes of ``Said``; a second kernel makes of those of
4096 tokens the record that ``sampling`` keeps of them, and its own second pass finishes.  The noise of a
token, or of a group of 64 and of the draw within it, is ``sampling``'s: keyed by the row's seed and position
and the token, never by the tile.

A program takes tile after tile.  Where warps of their own copy, those of the next tile arrive while the
others draw from this one.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops._tile_product import tile_place, tile_product
from rlkernel.triton_ops.logprob_kernels import LN2, LOG2E, finite_or_zero, transform
from rlkernel.triton_ops.sampling_finish_kernels import scales
from rlkernel.triton_ops.sampling_kernels import (
    COLDEST,
    HOTTEST,
    RECORD,
    SPLIT,
    Field,
    load_scalar,
    masses,
    softmax_temperature,
)
from rlkernel.triton_ops.sampling_kernels import GROUP as TOKENS
from rlkernel.triton_ops.sampling_random import INSIDE, draw_below, group_noise, gumbel_noise

# What a tile leaves of a row, all as fp32, which has any token.  The draw's key is relative to max_z / T.
Said = Names(("max_z", "sum_z", "weighted", "finite", "sum_x", "argmax", "key", "token", "token_z"))


@triton.jit
def first_of(hits, places, BEHIND: tl.constexpr):
    """The lowest place of each row that is hit; the last one where none is, as in rows that are NaN."""
    return tl.minimum(tl.min(tl.where(hits, places, BEHIND), axis=1), BEHIND - 1)


@triton.jit
def noisiest_token(z, top, t, seed, position, first, BN: tl.constexpr):
    """``(key, column, z)`` of the token with the largest ``(z - top) / T + noise`` of each row."""
    columns = tl.arange(0, BN)
    noise = gumbel_noise(seed[:, None], position[:, None], (first + columns)[None, :])
    keys = (z - top[:, None]) / t[:, None] + noise
    keys = tl.where(z > float("-inf"), keys, float("-inf"))
    key = tl.max(keys, axis=1)
    column = first_of(keys == key[:, None], columns[None, :], BN)
    return key, column, tl.max(tl.where(columns[None, :] == column[:, None], z, float("-inf")), axis=1)


@triton.jit
def which(weights, below, BM: tl.constexpr, EIGHT: tl.constexpr):
    """Of eight whole numbers of each row the one that has ``below``, and what of it is left: by halves."""
    place = tl.arange(0, EIGHT)[None, :]
    index = tl.zeros((BM,), tl.int32)
    for level in tl.static_range(3):
        upto = index + (EIGHT >> (level + 1))
        left = tl.sum(tl.where((place >= index[:, None]) & (place < upto[:, None]), weights, 0), axis=1)
        beyond = below >= left
        below -= tl.where(beyond, left, 0)
        index = tl.where(beyond, upto, index)
    return index, below


@triton.jit
def token_of_a_group(z, e, c, seed, position, first, BM: tl.constexpr, BN: tl.constexpr):
    """``(key, column, z)``: the group with the largest log of its mass and noise, and a draw in it."""
    GROUPS: tl.constexpr = BN // TOKENS
    i = tl.arange(0, GROUPS)
    mass = tl.sum(tl.reshape(e, (BM, GROUPS, TOKENS)), axis=2)
    keys = tl.log(mass) + group_noise(seed[:, None], position[:, None], (first // TOKENS + i)[None, :])
    key = tl.max(keys, axis=1)
    group = first_of(keys == key[:, None], i[None, :], GROUPS)
    here = (i[None, :] == group[:, None])[:, :, None]
    z_group = tl.max(tl.where(here, tl.reshape(z, (BM, GROUPS, TOKENS)), float("-inf")), axis=1)
    top = finite_or_zero(tl.max(z_group, axis=1))
    # their masses are whole numbers: first the sums of eights, then the eight that has the draw
    weights = masses(tl.exp2((z_group - top[:, None]) * c[:, None]))
    sums = tl.sum(tl.reshape(weights, (BM, TOKENS // 8, 8)), axis=2)
    below = draw_below(tl.sum(sums, axis=1), INSIDE, seed, position)
    eight, below = which(sums, below, BM, TOKENS // 8)
    place = tl.arange(0, 8)[None, :]
    here = (place == eight[:, None])[:, :, None]
    z_eight = tl.max(tl.where(here, tl.reshape(z_group, (BM, TOKENS // 8, 8)), float("-inf")), axis=1)
    index, _ = which(masses(tl.exp2((z_eight - top[:, None]) * c[:, None])), below, BM, 8)
    z_token = tl.max(tl.where(place == index[:, None], z_eight, float("-inf")), axis=1)
    index += eight * 8
    return key, group * TOKENS + index, z_token


@triton.jit(do_not_specialize=["N", "V", "temperature"])
def draw_kernel(
    hidden, hidden_stride: tl.int64, weight, weight_stride: tl.int64, N, V, H,
    temperatures, temperature: tl.float32, seeds, positions, bias, logit_scale, softcap, said,
    RAW: tl.constexpr, ENTROPY: tl.constexpr, GUMBEL: tl.constexpr,
    COMPUTE: tl.constexpr, LOGITS: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE_K: tl.constexpr, SPECIALIZED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(N, BM), tl.cdiv(V, BN)
    plane = column_tiles.to(tl.int64) * N
    if DESCRIBED:
        hidden = tl.make_tensor_descriptor(hidden, [N, H], [hidden_stride, 1], [BM, BK])
        weight = tl.make_tensor_descriptor(weight, [V, H], [weight_stride, 1], [BN, BK])
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_block, block = tile_place(tile, row_tiles, column_tiles, GROUP)
        first = block * BN
        y = tile_product(
            hidden, hidden_stride, weight, weight_stride, row_block * BM, first, N, V, H,
            tl.zeros((BM, BN), tl.float32), False, False,
            COMPUTE, DESCRIBED, WHOLE_K, SPECIALIZED, BM, BN, BK,
        )  # fmt: skip
        rows = row_block * BM + tl.arange(0, BM)
        row = tl.minimum(rows, N - 1)  # rows beyond the end repeat the last, and are not stored
        asked = tl.broadcast_to(load_scalar(temperatures, temperature, row), (BM,))
        drawn = (asked >= COLDEST) & (asked <= HOTTEST)  # else greedy, or no temperature and no valid row
        t = tl.where(drawn, asked, 1.0)
        c = (1.0 / t.to(tl.float64) * LOG2E).to(tl.float32)
        seed = tl.load(seeds + row)
        position = tl.zeros((BM,), tl.int64)
        if positions is not None:
            position = tl.load(positions + row)
        columns = tl.arange(0, BN)
        known = (first + columns < V)[None, :]
        z = transform(y.to(LOGITS), bias, (first + columns)[None, :], known, logit_scale, softcap)[0]
        z = tl.where(known, z, float("-inf"))
        m = tl.max(z, axis=1)
        top = finite_or_zero(m)
        d = (z - top[:, None]) * c[:, None]
        e = tl.exp2(d)
        sum_z = tl.sum(e, axis=1)
        weighted, sum_x = sum_z, sum_z
        if ENTROPY:
            weighted = tl.sum(e * tl.maximum(d, -150.0), axis=1)  # 2**-150 is 0, and 0 * -inf would be NaN
        if RAW:
            sum_x = tl.sum(tl.exp2((z - top[:, None]) * LOG2E), axis=1)
        finite = tl.sum((z > float("-inf")).to(tl.int32), axis=1)
        likeliest = first_of(z == m[:, None], columns[None, :], BN)
        if GUMBEL:
            key, column, z_token = noisiest_token(z, top, t, seed, position, first, BN)
        else:
            key, column, z_token = token_of_a_group(z, e, c, seed, position, first, BM, BN)
        # among greedy tiles the one with the largest z wins: all have the same key
        key = tl.where(drawn | (m == float("-inf")), key, 0.0)
        column = tl.where(drawn, column, likeliest)
        z_token = tl.where(drawn, z_token, m)
        out = said + block.to(tl.int64) * N + rows
        inside = rows < N
        tl.store(out + Said.max_z * plane, m, mask=inside)
        tl.store(out + Said.sum_z * plane, sum_z, mask=inside)
        if ENTROPY:
            tl.store(out + Said.weighted * plane, weighted, mask=inside)
        tl.store(out + Said.finite * plane, finite.to(tl.float32), mask=inside)
        if RAW:
            tl.store(out + Said.sum_x * plane, sum_x, mask=inside)
        tl.store(out + Said.argmax * plane, (first + likeliest).to(tl.float32), mask=inside)
        tl.store(out + Said.key * plane, key, mask=inside)
        tl.store(out + Said.token * plane, (first + column).to(tl.float32), mask=inside)
        tl.store(out + Said.token_z * plane, z_token, mask=inside)


@triton.jit(do_not_specialize=["N", "V", "tiles", "splits", "temperature"])
def record_kernel(
    said, N, V, tiles, splits, temperatures, temperature: tl.float32, records,
    RAW: tl.constexpr, ENTROPY: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The record of 4096 tokens of some rows, of those of their tiles; in fp64, as its numbers are."""
    TILES: tl.constexpr = SPLIT // BN
    split = tl.program_id(0) % splits
    rows = tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    row = tl.minimum(rows, N - 1).to(tl.int64)
    per_t = 1.0 / softmax_temperature(tl.broadcast_to(load_scalar(temperatures, temperature, row), (ROWS,)))
    i = tl.arange(0, TILES)
    tile = split * TILES + i
    here = (tile < tiles)[:, None]
    at = said + tile.to(tl.int64)[:, None] * N + row[None, :]
    plane = tiles.to(tl.int64) * N
    maxima = tl.load(at + Said.max_z * plane, mask=here, other=float("-inf")).to(tl.float64)
    top = tl.max(maxima, axis=0)
    safe = finite_or_zero(top)[None, :]
    scale = scales(maxima, safe, per_t[None, :])
    shift = tl.where(maxima == float("-inf"), 0.0, (maxima - safe) * per_t[None, :])
    sums = tl.load(at + Said.sum_z * plane, mask=here, other=0.0).to(tl.float64)
    finite = tl.load(at + Said.finite * plane, mask=here, other=0.0).to(tl.float64)
    total = tl.sum(sums * scale, axis=0)
    weighted = tl.zeros((ROWS,), tl.float64)
    if ENTROPY:
        w = tl.load(at + Said.weighted * plane, mask=here, other=0.0).to(tl.float64) * LN2
        weighted = tl.sum((w + sums * shift) * scale, axis=0)
    total_x = total
    if RAW:
        sums_x = tl.load(at + Said.sum_x * plane, mask=here, other=0.0).to(tl.float64)
        total_x = tl.sum(sums_x * scales(maxima, safe, 1.0), axis=0)
    likeliest = tl.load(at + Said.argmax * plane, mask=here, other=0.0)
    likeliest = tl.min(tl.where((maxima == top[None, :]) & here, likeliest, V.to(tl.float32)), axis=0)
    key = tl.load(at + Said.key * plane, mask=here, other=float("-inf")).to(tl.float64)
    score = tl.where((key == float("inf")) | (key == float("-inf")), key, key + shift)
    best = tl.max(score, axis=0)
    chosen = tl.minimum(tl.min(tl.where(score == best[None, :], i[:, None], TILES), axis=0), TILES - 1)
    chosen = i[:, None] == chosen[None, :]
    token = tl.load(at + Said.token * plane, mask=here, other=0.0)
    z_token = tl.load(at + Said.token_z * plane, mask=here, other=float("-inf"))
    token = tl.sum(tl.where(chosen, token, 0.0), axis=0)
    z_token = tl.sum(tl.where(chosen, z_token, 0.0), axis=0).to(tl.float64)
    record = records + (row * splits + split) * RECORD
    zero = tl.zeros((ROWS,), tl.float64)
    tl.store(record + Field.max_z, top, mask=inside)
    tl.store(record + Field.argmax, likeliest.to(tl.float64), mask=inside)
    tl.store(record + Field.sum_z, total, mask=inside)
    tl.store(record + Field.weighted, weighted, mask=inside)
    tl.store(record + Field.finite, tl.sum(finite, axis=0), mask=inside)
    tl.store(record + Field.mean, zero, mask=inside)
    tl.store(record + Field.m2, zero, mask=inside)
    tl.store(record + Field.max_x, top, mask=inside)
    tl.store(record + Field.sum_x, total_x, mask=inside)
    tl.store(record + Field.key, best, mask=inside)
    tl.store(record + Field.token, token.to(tl.float64), mask=inside)
    tl.store(record + Field.token_z, z_token, mask=inside)
    tl.store(record + Field.token_x, z_token, mask=inside)
