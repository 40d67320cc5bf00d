"""The Triton kernels of ``value_loss``: a program per chunk of a sequence, then one that merges the partials.

A chunk has a slot, found on the device: floor(begin / CHUNK) + sequence is the first of a packed sequence,
which leaves room for all its chunks before the next one's.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import Names, fixed_order, store_all

CHUNK = 2048  # tokens of a sequence that are summed together
Sum = Names((
    "count", "loss", "nonfinite", "clipped", "return_mean", "return_squares", "error_mean", "error_squares",
))  # fmt: skip
SUMS = tl.constexpr(len(Sum))
ROWS = 64  # sequences that the merging program takes at a time

_SIZES = ["values_stride", "returns_stride", "old_stride", "mask_stride", "rows", "length", "steps"]
_TENSORS = ["values", "returns", "old_values", "mask", "cu_seqlens", "slope", "partials", "scale"]
_TENSORS += ["loss", "metrics", "items", "grad_loss", "out"]
_jit = fixed_order(_SIZES, _TENSORS)


@triton.jit
def begin_of(cu_seqlens, row, rows, length):
    """Offsets that are no offsets are bent into [0, N]."""
    at = tl.load(cu_seqlens + row, mask=row <= rows, other=0).to(tl.int64)
    return tl.where(row > rows, length, tl.minimum(tl.maximum(at, 0), length))


@triton.jit
def locate(cu_seqlens, slot, rows, length, steps, CHUNK: tl.constexpr):
    """``(row, begin, count)`` of a slot's chunk: its first token and how many it has, 0 or fewer for a slot
    that no chunk needs.  Row ``rows`` is the padding behind packed sequences."""
    if cu_seqlens is None:
        chunks = (length + CHUNK - 1) // CHUNK
        row = slot // chunks
        begin = (slot % chunks) * CHUNK
        end = length
    else:
        row = tl.zeros((), tl.int64)
        high = row + rows
        for _ in range(steps):
            middle = (row + high + 1) // 2
            fits = begin_of(cu_seqlens, middle, rows, length) // CHUNK + middle <= slot
            row, high = tl.where(fits, middle, row), tl.where(fits, high, middle - 1)
        start = begin_of(cu_seqlens, row, rows, length)
        end = begin_of(cu_seqlens, row + 1, rows, length)
        begin = start + (slot - start // CHUNK - row) * CHUNK
    return row, begin, tl.minimum(end - begin, CHUNK)


@triton.jit
def token_loss(difference, huber_delta):
    """The loss and its derivative."""
    square = 0.5 * difference * difference
    slope = difference
    if huber_delta is not None:
        size = tl.abs(difference)
        far = size >= huber_delta
        square = tl.where(far, huber_delta * (size - 0.5 * huber_delta), square)
        slope = tl.where(far, tl.where(difference < 0, -huber_delta, huber_delta), difference)
    return square, slope


@triton.jit
def inverse(x):
    """1 / x where fp32 holds that: a division in fp64 is a call, which puts registers on the stack."""
    guess = (1.0 / x.to(tl.float32)).to(tl.float64)
    guess = guess * (2.0 - x * guess)
    return guess * (2.0 - x * guess)


@triton.jit
def moments(x, kept, count, first):
    """Mean and sum of squared deviations, by two passes, from the smallest kept token on: of equal values the
    second is exactly 0."""
    d = tl.where(kept, x.to(tl.float64) - first, 0.0)
    mean = tl.sum(d) * inverse(tl.maximum(count, 1.0))
    d = tl.where(kept, d - mean, 0.0)
    return tl.where(count > 0, first + mean, 0.0), tl.sum(d * d)


@triton.jit
def merge_moments(count, mean, squares, more, more_mean, more_squares):
    """Of two parts together (Chan, Golub and LeVeque 1979)."""
    share = more * inverse(tl.maximum(count + more, 1.0))
    apart = tl.where((count > 0) & (more > 0), more_mean - mean, 0.0)
    merged = tl.where(count > 0, mean + apart * share, more_mean)
    return merged, squares + more_squares + apart * apart * count * share


@triton.jit
def joined(count, mean, squares, each, ROWS: tl.constexpr):
    """Mean and sum of squared deviations of all lanes, whose counts have the inverse ``each``."""
    lanes = tl.arange(0, ROWS)
    # the lanes' means are shifted by one of theirs, or equal returns would get a variance
    lane = tl.min(tl.where(count > 0, lanes, ROWS - 1))
    first = tl.sum(tl.where(lanes == lane, mean, 0.0))
    d = tl.where(count > 0, mean - first, 0.0)
    apart = tl.sum(count * d) * each
    between = tl.sum(tl.where(count > 0, count * (d - apart) * (d - apart), 0.0))
    return first + apart, tl.sum(squares) + between


@_jit
def chunk_kernel(
    values, values_stride: tl.int64, returns, returns_stride: tl.int64, old_values, old_stride: tl.int64,
    mask, mask_stride: tl.int64, rows: tl.int64, length: tl.int64, cu_seqlens, steps,
    cliprange, huber_delta, slope, partials, CHUNK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row, begin, count = locate(cu_seqlens, slot, rows, length, steps, CHUNK)
    strided = row
    if cu_seqlens is not None:
        strided = row * 0
    i = tl.arange(0, CHUNK)
    inside = i < count
    kept = i < tl.where(row < rows, count, 0)
    kept &= tl.load(mask + strided * mask_stride + begin + i, mask=kept, other=0) != 0
    value = tl.load(values + strided * values_stride + begin + i, mask=kept, other=0.0).to(tl.float32)
    target = tl.load(returns + strided * returns_stride + begin + i, mask=kept, other=0.0).to(tl.float32)
    loss, gradient = token_loss(value - target, huber_delta)
    clipped = kept & False
    if old_values is not None:
        old = tl.load(old_values + strided * old_stride + begin + i, mask=kept, other=0.0).to(tl.float32)
        low, high = old - cliprange, old + cliprange
        bounded = tl.where(value > high, high, value)
        bounded = tl.where(bounded < low, low, bounded)
        other, _ = token_loss(bounded - target, huber_delta)
        other = tl.where(old != old, old, other)
        clipped = kept & (other > loss)
        odd = other != other
        gradient = tl.where(clipped, 0.0, tl.where(odd, other, gradient))
        loss = tl.where(clipped | odd, other, loss)
    if slope is not None:
        tl.store(slope + strided * length + begin + i, tl.where(kept, gradient, 0.0), mask=inside)
    if (count > 0) & (row < rows):
        number = tl.sum(kept.to(tl.int32)).to(tl.float64)
        place = tl.min(tl.where(kept, i, CHUNK))
        error = target - value
        first_return = tl.sum(tl.where(kept & (i == place), target, 0.0)).to(tl.float64)
        first_error = tl.sum(tl.where(kept & (i == place), error, 0.0)).to(tl.float64)
        return_mean, return_squares = moments(target, kept, number, first_return)
        error_mean, error_squares = moments(error, kept, number, first_error)
        nonfinite = kept & ~(tl.abs(loss) < float("inf"))
        total = tl.sum(tl.where(kept, loss, 0.0).to(tl.float64))
        store_all(partials + slot * SUMS, (
            number, total, tl.sum(nonfinite.to(tl.int32)), tl.sum(clipped.to(tl.int32)), return_mean,
            return_squares, error_mean, error_squares,
        ))  # fmt: skip


@_jit
def total_kernel(
    partials, rows: tl.int64, length: tl.int64, cu_seqlens, items, item_count: tl.float64, factor: tl.float64,
    scale, loss, metrics, UNIT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, ROWS)
    zeros = tl.zeros((ROWS,), tl.float64)
    objective, sequences, nonfinite, clipped = zeros, zeros, zeros, zeros
    all_count, r_mean, r_squares, e_mean, e_squares = zeros, zeros, zeros, zeros, zeros
    for first in range(0, rows, ROWS):
        row = first + lanes.to(tl.int64)
        there = row < rows
        if cu_seqlens is None:
            chunks = tl.where(there, (length + CHUNK - 1) // CHUNK, 0)
            slot = row * ((length + CHUNK - 1) // CHUNK)
        else:
            safe = tl.minimum(row, rows)
            begin = begin_of(cu_seqlens, safe, rows, length)
            end = begin_of(cu_seqlens, safe + 1, rows, length)
            chunks = tl.where(there & (end > begin), (end - begin + CHUNK - 1) // CHUNK, 0)
            slot = begin // CHUNK + row
        count, total = zeros, zeros
        row_r, row_rr, row_e, row_ee = zeros, zeros, zeros, zeros
        for chunk in range(tl.max(chunks)):
            has = chunk < chunks
            part = partials + (slot + chunk) * SUMS
            more = tl.load(part + Sum.count, mask=has, other=0.0)
            total += tl.load(part + Sum.loss, mask=has, other=0.0)
            nonfinite += tl.load(part + Sum.nonfinite, mask=has, other=0.0)
            clipped += tl.load(part + Sum.clipped, mask=has, other=0.0)
            mean = tl.load(part + Sum.return_mean, mask=has, other=0.0)
            squares = tl.load(part + Sum.return_squares, mask=has, other=0.0)
            row_r, row_rr = merge_moments(count, row_r, row_rr, more, mean, squares)
            mean = tl.load(part + Sum.error_mean, mask=has, other=0.0)
            squares = tl.load(part + Sum.error_squares, mask=has, other=0.0)
            row_e, row_ee = merge_moments(count, row_e, row_ee, more, mean, squares)
            count += more
        tl.store(scale + row, count.to(tl.float32), mask=there)
        if UNIT == "mean":
            objective += total * inverse(tl.maximum(count, 1.0))
        else:
            objective += total
        sequences += (count > 0).to(tl.float64)
        r_mean, r_squares = merge_moments(all_count, r_mean, r_squares, count, row_r, row_rr)
        e_mean, e_squares = merge_moments(all_count, e_mean, e_squares, count, row_e, row_ee)
        all_count += count

    tokens = tl.sum(all_count)
    each = inverse(tl.maximum(tokens, 1.0))
    return_mean, return_squares = joined(all_count, r_mean, r_squares, each, ROWS)
    error_mean, error_squares = joined(all_count, e_mean, e_squares, each, ROWS)

    divisor = item_count
    if items is not None:
        divisor = tl.load(items).to(tl.float64)
    elif UNIT == "token":
        divisor = tl.where(item_count == 0, tokens, item_count)
    else:
        divisor = tl.where(item_count == 0, tl.sum(sequences), item_count)
    weight = tl.where(tokens > 0, factor * inverse(tl.where(tokens > 0, divisor, 1.0)), 0.0)
    tl.store(loss, (weight * tl.sum(objective)).to(tl.float32))
    varies = return_squares > 0
    explained = 1.0 - error_squares * inverse(tl.where(varies, return_squares, 1.0))
    store_all(metrics, (
        tokens, tl.sum(nonfinite), tl.sum(clipped) * each, return_mean - error_mean, return_mean,
        return_squares * each, error_mean, error_squares * each, tl.where(varies, explained, float("nan")),
    ))  # fmt: skip

    tl.debug_barrier()  # the counts in scale are read by other threads than wrote them
    for first in range(0, rows, ROWS):
        row = first + lanes.to(tl.int64)
        there = row < rows
        count = tl.load(scale + row, mask=there, other=0.0).to(tl.float64)
        share = weight
        if UNIT == "mean":
            share = weight * inverse(tl.maximum(count, 1.0))
        tl.store(scale + row, tl.where(count > 0, share, 0.0).to(tl.float32), mask=there)


@_jit
def multiply_kernel(
    grad_loss, slope, scale, rows: tl.int64, length: tl.int64, cu_seqlens, steps, out, CHUNK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row, begin, count = locate(cu_seqlens, slot, rows, length, steps, CHUNK)
    factor = tl.load(grad_loss) * tl.load(scale + row, mask=row < rows, other=0.0)
    start = begin
    if cu_seqlens is None:
        start = row * length + begin
    i = tl.arange(0, CHUNK)
    x = tl.load(slope + start + i, mask=i < count, other=0.0)
    tl.store(out + start + i, (x * factor).to(out.dtype.element_ty), mask=i < count)
