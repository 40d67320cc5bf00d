"""The Triton kernels of ``whiten``: a program per chunk takes its moments, then every program merges all of
them in the same order and scales its chunk."""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import Names, fixed_order, store_all
from rlkernel.triton_ops.value_loss_kernels import inverse, merge_moments

CHUNK = 2048  # elements whose moments are taken together
MERGED = 256  # chunks that are merged at a time
Moment = Names(("count", "mean", "squares"))
MOMENTS = tl.constexpr(len(Moment))

_jit = fixed_order(["n", "state_count"], ["x", "mask", "weights", "states", "partials", "out", "state"])


@triton.jit
def square_root(x):
    """Of a double >= 0 to the digits of a double, by Newton's method: a root in fp64 is a call."""
    big, small = x > 1e36, x < 1e-36
    scaled = tl.where(big, x * 2.0**-240, tl.where(small, x * 2.0**240, x))
    positive = scaled > 0
    guess = tl.math.rsqrt(tl.where(positive, scaled, 1.0).to(tl.float32)).to(tl.float64)
    guess = guess * (1.5 - 0.5 * scaled * guess * guess)
    guess = guess * (1.5 - 0.5 * scaled * guess * guess)
    root = tl.where(positive, scaled * guess, scaled)
    return tl.where(big, root * 2.0**120, tl.where(small, root * 2.0**-120, root))


@triton.jit
def reciprocal(x):
    """1 / x to the digits of a double where fp32 holds it, else what fp32 makes of it."""
    rough = 1.0 / x.to(tl.float32)
    fine = inverse(x)
    return tl.where((tl.abs(rough) < float("inf")) & (rough != 0), fine, rough.to(tl.float64))


@triton.jit
def moments_of(x, weight):
    """Count, mean and squares of a tile, by differences to its first element of weight > 0: of equal ones
    the squares are exactly 0."""
    place = tl.arange(0, x.shape[0])
    counts = weight != 0
    first_place = tl.min(tl.where(counts, place, x.shape[0]))
    first = tl.sum(tl.where(counts & (place == first_place), x, 0.0))
    count = tl.sum(weight)
    share = inverse(tl.where(count > 0, count, 1.0))
    d = tl.where(counts, x - first, 0.0)
    above = tl.sum(weight * d) * share
    d = tl.where(counts, d - above, 0.0)
    return count, tl.where(count > 0, first + above, 0.0), tl.sum(weight * d * d)


@triton.jit
def merge_lanes(count, mean, squares):
    """Of the lanes' moments, by differences to the first lane that has any."""
    lane = tl.arange(0, count.shape[0])
    first_lane = tl.min(tl.where(count > 0, lane, count.shape[0]))
    first = tl.sum(tl.where((count > 0) & (lane == first_lane), mean, 0.0))
    total = tl.sum(count)
    d = tl.where(count > 0, mean - first, 0.0)
    above = tl.sum(count * d) * inverse(tl.where(total > 0, total, 1.0))
    d = tl.where(count > 0, d - above, 0.0)
    return total, tl.where(total > 0, first + above, 0.0), tl.sum(squares) + tl.sum(count * d * d)


@triton.jit
def merge_partials(partials, chunks, MERGED: tl.constexpr):
    """The moments of all chunks, each lane every ``MERGED``-th of them."""
    lane = tl.arange(0, MERGED)
    count = tl.zeros((MERGED,), tl.float64)
    mean, squares = count, count
    for begin in range(0, chunks, MERGED):
        part = partials + (begin + lane).to(tl.int64) * MOMENTS
        there = begin + lane < chunks
        part_count = tl.load(part + Moment.count, mask=there, other=0.0)
        part_mean = tl.load(part + Moment.mean, mask=there, other=0.0)
        part_squares = tl.load(part + Moment.squares, mask=there, other=0.0)
        mean, squares = merge_moments(count, mean, squares, part_count, part_mean, part_squares)
        count += part_count
    return merge_lanes(count, mean, squares)


@_jit
def moments_kernel(x, mask, weights, n: tl.int64, partials, CHUNK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    kept = i < n
    if mask is not None:
        kept = kept & (tl.load(mask + i, mask=kept, other=0) != 0)
    value = tl.load(x + i, mask=kept, other=0.0).to(tl.float64)
    weight = kept.to(tl.float64)
    if weights is not None:
        weight = tl.load(weights + i, mask=kept, other=0.0).to(tl.float64)
    store_all(partials + chunk * MOMENTS, moments_of(value, weight))


@_jit
def scale_kernel(
    x, mask, n: tl.int64, states, state_count, partials, out, state,
    eps: tl.float64, clip: tl.float64, UPDATE: tl.constexpr, IDENTITY: tl.constexpr, SHIFT_MEAN: tl.constexpr,
    UNBIASED: tl.constexpr, EPS_IN_STD: tl.constexpr, CHUNK: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    chunks = (n + CHUNK - 1) // CHUNK
    count = tl.zeros((), tl.float64)
    mean, squares = count, count
    if states is not None:
        for i in range(state_count):
            part = states + i * MOMENTS
            part_count, part_mean = tl.load(part + Moment.count), tl.load(part + Moment.mean)
            part_squares = tl.load(part + Moment.squares)
            mean, squares = merge_moments(count, mean, squares, part_count, part_mean, part_squares)
            count += part_count
    if UPDATE:
        part_count, part_mean, part_squares = merge_partials(partials, chunks, MERGED)
        mean, squares = merge_moments(count, mean, squares, part_count, part_mean, part_squares)
        count += part_count
    if state is not None and chunk == 0:
        store_all(state, (count, mean, squares))
    if out is not None:
        freedom = count
        if UNBIASED:
            freedom = count - 1.0
        variance = squares * reciprocal(tl.where(freedom > 1.1920929e-7, freedom, 1.1920929e-7))
        if IDENTITY:
            variance = tl.where(count < 2, 1.0, variance)
        if EPS_IN_STD:
            divisor = square_root(variance) + eps
        else:
            divisor = square_root(variance + eps)
        scale = reciprocal(divisor)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = i < n
        kept = inside
        if mask is not None:
            kept = inside & (tl.load(mask + i, mask=inside, other=0) != 0)
        centred = tl.load(x + i, mask=kept, other=0.0).to(tl.float64) - mean
        y = tl.where(centred == 0, 0.0, centred * scale)
        if not SHIFT_MEAN:
            y = y + mean
        y = tl.where(y > clip, clip, tl.where(y < -clip, -clip, y))
        tl.store(out + i, tl.where(kept, y, 0.0).to(tl.float32), mask=inside)
