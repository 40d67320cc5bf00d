"""The Triton kernels of ``rms_norm``, and what the norms share: a program per row, and sums over rows.

A row's sum runs in the order that its length decides: BLOCK lanes take every BLOCK-th element and are then
summed by one binary, which no alignment and no stride specialises.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import fixed_order

CHUNK_ROWS = 32  # rows whose sum stands in a partial of its own
COLUMNS = 64  # that a program of the sums over rows takes
CHUNKS = 16  # partials that it takes at a time

SIZES = [
    f"{name}_{part}" for name in ("x", "residual", "grad", "more") for part in ("inner", "outer", "step")
]
SIZES += ["rows", "length"]
TENSORS = ["x", "residual", "summed", "weight", "bias", "normed", "rstd", "mean", "grad", "more", "grad_x"]
TENSORS += ["partials", "out"]
jit = fixed_order(SIZES, TENSORS)


@triton.jit
def start_of(row, inner, outer, step):
    """Where a row starts: two strides between rows, none within."""
    return (row // inner) * outer + (row % inner) * step


@triton.jit
def scale_at(weight, i, there, offset):
    scale = tl.full(i.shape, 1.0, tl.float32)
    if weight is not None:
        scale = tl.load(weight + i, mask=there, other=0.0).to(tl.float32) + offset
    return scale


@jit
def rms_forward_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    residual, residual_inner: tl.int64, residual_outer: tl.int64, residual_step: tl.int64,
    summed, weight, offset: tl.float32, eps: tl.float32, normed, rstd, length: tl.int64,
    ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    source = x + start_of(row, x_inner, x_outer, x_step)
    if residual is not None:
        residual += start_of(row, residual_inner, residual_outer, residual_step)
        summed += row * length
    lanes = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        h = tl.load(source + begin + i, mask=there, other=0.0).to(tl.float32)
        if residual is not None:
            h += tl.load(residual + begin + i, mask=there, other=0.0).to(tl.float32)
            h = h.to(summed.dtype.element_ty)
            tl.store(summed + begin + i, h, mask=there)
            h = h.to(tl.float32)
        lanes = tl.fma(h, h, lanes)
    scale = 1.0 / tl.sqrt_rn(tl.sum(lanes) / length.to(tl.float32) + eps)
    if rstd is not None:
        tl.store(rstd + row, scale)
    if residual is not None:
        tl.debug_barrier()  # the sums are read by other threads than wrote them
        source = summed
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        y = tl.load(source + begin + i, mask=there, other=0.0).to(tl.float32) * scale
        if weight is not None:
            if ROUND_FIRST:
                y = y.to(normed.dtype.element_ty).to(tl.float32)
            y *= scale_at(weight, begin + i, there, offset)
        tl.store(normed + row * length + begin + i, y.to(normed.dtype.element_ty), mask=there)


@jit
def rms_backward_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    grad, grad_inner: tl.int64, grad_outer: tl.int64, grad_step: tl.int64,
    more, more_inner: tl.int64, more_outer: tl.int64, more_step: tl.int64,
    rstd, weight, offset: tl.float32, grad_x, length: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x += start_of(row, x_inner, x_outer, x_step)
    grad += start_of(row, grad_inner, grad_outer, grad_step)
    if more is not None:
        more += start_of(row, more_inner, more_outer, more_step)
    scale = tl.load(rstd + row)
    lanes = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        n = tl.load(x + begin + i, mask=there, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + begin + i, mask=there, other=0.0).to(tl.float32)
        product = g * scale_at(weight, begin + i, there, offset)
        lanes = tl.where(there, tl.fma(product, n, lanes), lanes)
    along = tl.sum(lanes) / length.to(tl.float32)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        n = tl.load(x + begin + i, mask=there, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + begin + i, mask=there, other=0.0).to(tl.float32)
        d = (g * scale_at(weight, begin + i, there, offset) - n * along) * scale
        if more is not None:
            d += tl.load(more + begin + i, mask=there, other=0.0).to(tl.float32)
        tl.store(grad_x + row * length + begin + i, d.to(grad_x.dtype.element_ty), mask=there)


@jit
def rms_weight_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    grad, grad_inner: tl.int64, grad_outer: tl.int64, grad_step: tl.int64,
    rstd, partials, rows: tl.int64, length: tl.int64, CHUNK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = (length + COLUMNS - 1) // COLUMNS
    chunk = tl.program_id(0).to(tl.int64) // tiles
    i = tl.program_id(0).to(tl.int64) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    there = i < length
    total = tl.zeros((COLUMNS,), tl.float32)
    for row in range(chunk * CHUNK_ROWS, tl.minimum((chunk + 1) * CHUNK_ROWS, rows)):
        h = tl.load(x + start_of(row, x_inner, x_outer, x_step) + i, mask=there, other=0.0)
        g = tl.load(grad + start_of(row, grad_inner, grad_outer, grad_step) + i, mask=there, other=0.0)
        total += g.to(tl.float32) * (h.to(tl.float32) * tl.load(rstd + row))
    tl.store(partials + chunk * length + i, total, mask=there)


@jit
def norm_total_kernel(
    partials, rows: tl.int64, length: tl.int64, out,
    CHUNK_ROWS: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    chunks = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
    total = tl.zeros((CHUNKS, COLUMNS), tl.float64)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        there = (chunk < chunks) & (i < length)
        total += tl.load(partials + chunk * length + i, mask=there, other=0.0).to(tl.float64)
    found = tl.sum(total, 0, keep_dims=True).to(tl.float32)
    tl.store(out + i, found.to(out.dtype.element_ty), mask=i < length)
