"""The Triton kernels of ``group_advantages``: a program per group, which walks its places in tiles of one
size, so that the order of its sums follows from nothing but the place in the group."""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import fixed_order, store_all
from rlkernel.triton_ops.value_loss_kernels import merge_moments
from rlkernel.triton_ops.whiten_kernels import MOMENTS, Moment, moments_of, reciprocal, square_root

BLOCK = 128  # places of a tile
_SIZES = ["n", "columns", "size"]
_TENSORS = ["rewards", "mask", "reward_weights", "baselines", "lengths", "order", "ends", "offsets", "batch"]
_TENSORS += ["out", "wide", "counts"]
_jit = fixed_order(_SIZES, _TENSORS)


@triton.jit
def rewards_of(source, column, response, inside, WEIGHTED: tl.constexpr):
    """The reward and whether it counts: of one column, or the weighted sum of all."""
    rewards, mask, reward_weights, columns = source
    first, behind = column, column + 1
    if WEIGHTED:
        first, behind = column * 0, columns
    reward = tl.where(inside, 0.0, 0.0).to(tl.float64)
    counts = inside & False
    for k in range(first, behind):
        kept = inside
        if mask is not None:
            kept = inside & (tl.load(mask + response * columns + k, mask=inside, other=0) != 0)
        x = tl.load(rewards + response * columns + k, mask=kept, other=0.0).to(tl.float64)
        if WEIGHTED and reward_weights is not None:
            x = x * tl.load(reward_weights + k).to(tl.float64)
        reward += tl.where(kept, x, 0.0)
        counts = counts | kept
    return reward, counts


@_jit
def batch_kernel(
    rewards, mask, n: tl.int64, columns: tl.int64, reward_weights, batch, WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The moments of a chunk of responses, of each column."""
    slot = tl.program_id(0).to(tl.int64)
    chunks = (n + CHUNK - 1) // CHUNK
    i = slot % chunks * CHUNK + tl.arange(0, CHUNK)
    source = rewards, mask, reward_weights, columns
    reward, counts = rewards_of(source, slot // chunks, i, i < n, WEIGHTED)
    store_all(batch + slot * MOMENTS, moments_of(reward, counts.to(tl.float64)))


@triton.jit
def places_of(task, n, ends, offsets, size):
    """The places of a group; of a place where none starts, nothing."""
    if ends is not None:
        start = task
        before = tl.load(ends + task - 1, mask=task > 0, other=0)
        end = tl.where(before <= task, tl.minimum(tl.load(ends + task), n), task)
    elif offsets is not None:
        start = tl.minimum(tl.maximum(tl.load(offsets + task), 0), n)
        end = tl.minimum(tl.maximum(tl.load(offsets + task + 1), start), n)
    else:
        start = task * size
        end = tl.minimum(start + size, n)
    return start, end


@triton.jit
def responses_of(order, place, inside):
    response = place
    if order is not None:
        response = tl.load(order + place, mask=inside, other=0)
    return response


@triton.jit
def tile_of(source, order, column, place, end, WEIGHTED: tl.constexpr):
    """Of places of a group: whether they are inside, their responses and rewards, and whether those count."""
    inside = place < end
    response = responses_of(order, place, inside)
    reward, kept = rewards_of(source, column, response, inside, WEIGHTED)
    return inside, response, reward, kept


@_jit
def group_kernel(
    rewards, mask, n: tl.int64, columns: tl.int64, reward_weights, baselines, lengths, order, ends, offsets,
    size: tl.int64, eps: tl.float64, batch, out, wide, counts, KIND: tl.constexpr, SCALE: tl.constexpr,
    UNBIASED: tl.constexpr, REWARD_SINGLETONS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    start, end = places_of(tl.program_id(0).to(tl.int64), n, ends, offsets, size)
    eps = tl.full((), eps, tl.float64)  # the interpreter's is a number
    lane = tl.arange(0, BLOCK)
    none = tl.zeros((BLOCK,), tl.float64)
    far = 1 << 62
    source = rewards, mask, reward_weights, columns
    WEIGHTED: tl.constexpr = KIND != "gdpo"
    passes = columns
    if WEIGHTED:
        passes = columns * 0 + 1
    for column in range(passes):
        numbers, first_places = none, tl.full((BLOCK,), far, tl.int64)
        for begin in range(start, end, BLOCK):
            place = begin + lane
            inside, response, reward, kept = tile_of(source, order, column, place, end, WEIGHTED)
            numbers += kept.to(tl.float64)
            first_places = tl.minimum(first_places, tl.where(kept, place, far))
        number = tl.sum(numbers)
        first_place = tl.min(first_places)
        is_any = first_place < far
        leader = responses_of(order, tl.where(is_any, first_place, start), start < end)
        first, first_counts = rewards_of(source, column, leader, is_any, WEIGHTED)
        each = reciprocal(tl.where(is_any, number, 1.0))

        sums, length_sums, weighted_sums, best = none, none, none, none - float("inf")
        for begin in range(start, end, BLOCK):
            place = begin + lane
            inside, response, reward, kept = tile_of(source, order, column, place, end, WEIGHTED)
            d = tl.where(kept, reward - first, 0.0)
            sums += d
            if KIND == "opo":
                length = tl.load(lengths + response, mask=kept, other=0.0).to(tl.float64)
                length_sums += length
                weighted_sums += tl.where(kept, length * d, 0.0)
            if KIND == "passk":
                best = tl.where(kept & (d > best), d, best)
        above = tl.sum(sums) * each
        baseline = above
        if KIND == "opo":
            tokens = tl.sum(length_sums)
            baseline = tl.sum(weighted_sums) * reciprocal(tokens)
            baseline = tl.where(tokens == 0, above, baseline)  # without a token all lengths are alike

        divisor = above
        if SCALE == "group":
            squares = none
            for begin in range(start, end, BLOCK):
                place = begin + lane
                inside, response, reward, kept = tile_of(source, order, column, place, end, WEIGHTED)
                d = tl.where(kept, reward - first - above, 0.0)
                squares += d * d
            total, sum_of_squares = number, tl.sum(squares)
        if SCALE == "batch":
            chunks = (n + CHUNK - 1) // CHUNK
            total = tl.zeros((), tl.float64)
            mean, sum_of_squares = total, total
            for chunk in range(chunks):
                part = batch + (column * chunks + chunk) * MOMENTS
                count, squares = tl.load(part + Moment.count), tl.load(part + Moment.squares)
                mean, sum_of_squares = merge_moments(
                    total, mean, sum_of_squares, count, tl.load(part + Moment.mean), squares
                )
                total += count
        if SCALE != "none":
            freedom = total
            if UNBIASED:
                freedom = total - 1.0
            freedom = tl.where(freedom > 1, freedom, 1.0)
            divisor = reciprocal(square_root(sum_of_squares * reciprocal(freedom)) + eps)

        winner, lead = first_place, above
        if KIND == "passk":
            top = tl.max(best)
            winners, second = tl.full((BLOCK,), far, tl.int64), none - float("inf")
            for begin in range(start, end, BLOCK):
                place = begin + lane
                inside, response, reward, kept = tile_of(source, order, column, place, end, WEIGHTED)
                winners = tl.minimum(winners, tl.where(kept & (reward - first == top), place, far))
            winner = tl.min(winners)
            for begin in range(start, end, BLOCK):
                place = begin + lane
                inside, response, reward, kept = tile_of(source, order, column, place, end, WEIGHTED)
                d = reward - first
                second = tl.where(kept & (place != winner) & (d > second), d, second)
            lead = tl.where(number > 1, top - tl.max(second), 0.0)

        for begin in range(start, end, BLOCK):
            place = begin + lane
            inside, response, reward, kept = tile_of(source, order, column, place, end, WEIGHTED)
            d = reward - first
            result = d - above
            if KIND == "total":
                result = reward
                if baselines is not None:
                    result = reward - tl.load(baselines + response, mask=inside, other=0.0).to(tl.float64)
            elif KIND == "rloo":
                result = result * number * reciprocal(tl.where(number > 2, number - 1.0, 1.0))
            elif KIND == "leave_one_out":
                others, anchor, behind, apart = none, none, none, none
                for q in range(start, end):
                    _, _, other, counted = tile_of(source, order, column, q, end, WEIGHTED)
                    is_other = counted & (place != q)
                    anchor = tl.where(is_other & (others == 0), other, anchor)
                    others += is_other.to(tl.float64)
                    behind += tl.where(is_other, other - anchor, 0.0)
                mean = behind * reciprocal(tl.where(others > 1, others, 1.0))
                for q in range(start, end):
                    _, _, other, counted = tile_of(source, order, column, q, end, WEIGHTED)
                    e = tl.where(counted & (place != q), other - anchor - mean, 0.0)
                    apart += e * e
                freedom = others
                if UNBIASED:
                    freedom = others - 1.0
                freedom = tl.where(freedom > 1, freedom, 1.0)
                std = square_root(apart * reciprocal(freedom))
                result = tl.where(others > 0, reward - anchor - mean, 0.0)
                divided = result * reciprocal(tl.where(std == 0, 1.0, std + eps))
                result = tl.where((std == 0) | (result == 0), result, divided)
            elif KIND == "opo":
                result = tl.where(d == baseline, 0.0, d - baseline)
            elif KIND == "maxrl":
                result = tl.where(result == 0, 0.0, result * reciprocal(first + above + eps))
            elif KIND == "passk":
                result = tl.where(place == winner, lead, 0.0)
            if SCALE != "none":
                result = tl.where(result == 0, 0.0, result * divisor)
            if KIND == "passk":
                result = tl.where(above == above, result, above)
            elif REWARD_SINGLETONS and KIND != "total":
                alone = reward
                if SCALE != "none":
                    alone = reward * reciprocal(1.0 + eps)
                result = tl.where(number == 1, alone, result)
            if KIND == "gdpo" and reward_weights is not None:
                result = result * tl.load(reward_weights + column).to(tl.float64)
            result = tl.where(kept, result, 0.0)
            if out is not None:
                tl.store(out + response, result.to(tl.float32), mask=inside)
            else:
                # of the columns before: this thread wrote it
                before = tl.load(wide + response, mask=inside & (column > 0), other=0.0)
                tl.store(wide + response, before + result, mask=inside)
                total_reward, any_counts = rewards_of(source, column, response, inside, True)
                tl.store(counts + response, any_counts.to(tl.uint8), mask=inside)
        tl.debug_barrier()  # whichever thread wrote it
