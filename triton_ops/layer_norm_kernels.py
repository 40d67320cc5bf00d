"""The Triton kernels of ``layer_norm``: a program per row; sums in the order that rms_norm_kernels has."""

import triton.language as tl

from rlkernel.triton_ops.rms_norm_kernels import jit, scale_at, start_of


@jit
def layer_forward_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64, weight, bias, eps: tl.float32, normed, mean,
    rstd, length: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x += start_of(row, x_inner, x_outer, x_step)
    size = length.to(tl.float32)
    lanes = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, length, BLOCK):
        lanes += tl.load(x + begin + i, mask=begin + i < length, other=0.0).to(tl.float32)
    middle = tl.sum(lanes) / size
    lanes = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        d = tl.load(x + begin + i, mask=there, other=0.0).to(tl.float32) - middle
        d = tl.where(there, d, 0.0)
        lanes += d
        squares = tl.fma(d, d, squares)
    more, square = tl.sum(lanes), tl.sum(squares)
    shift = more / size
    lost = more * shift  # the smaller one, unless both overflow
    variance = (square - tl.where(lost < square, lost, 0.0)) / size
    scale = 1.0 / tl.sqrt_rn(variance + eps)
    if rstd is not None:
        tl.store(mean + row, middle + shift)
        tl.store(rstd + row, scale)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        y = (tl.load(x + begin + i, mask=there, other=0.0).to(tl.float32) - middle - shift) * scale
        if weight is not None:
            y *= scale_at(weight, begin + i, there, 0.0)
        if bias is not None:
            y += tl.load(bias + begin + i, mask=there, other=0.0).to(tl.float32)
        tl.store(normed + row * length + begin + i, y.to(normed.dtype.element_ty), mask=there)


@jit
def layer_backward_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    grad, grad_inner: tl.int64, grad_outer: tl.int64, grad_step: tl.int64,
    mean, rstd, weight, grad_x, length: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x += start_of(row, x_inner, x_outer, x_step)
    grad += start_of(row, grad_inner, grad_outer, grad_step)
    middle, scale = tl.load(mean + row), tl.load(rstd + row)
    sums = tl.zeros((BLOCK,), tl.float32)
    dots = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        n = (tl.load(x + begin + i, mask=there, other=0.0).to(tl.float32) - middle) * scale
        g = tl.load(grad + begin + i, mask=there, other=0.0).to(tl.float32)
        product = g * scale_at(weight, begin + i, there, 0.0)
        sums += product
        dots = tl.where(there, tl.fma(product, n, dots), dots)
    even, along = tl.sum(sums) / length.to(tl.float32), tl.sum(dots) / length.to(tl.float32)
    for begin in range(0, length, BLOCK):
        there = begin + i < length
        n = (tl.load(x + begin + i, mask=there, other=0.0).to(tl.float32) - middle) * scale
        g = tl.load(grad + begin + i, mask=there, other=0.0).to(tl.float32)
        d = (g * scale_at(weight, begin + i, there, 0.0) - even - n * along) * scale
        tl.store(grad_x + row * length + begin + i, d.to(grad_x.dtype.element_ty), mask=there)


@jit
def layer_sums_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    grad, grad_inner: tl.int64, grad_outer: tl.int64, grad_step: tl.int64,
    mean, rstd, partials, more, rows: tl.int64, length: tl.int64,
    CHUNK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a chunk of rows: for the weight into ``partials``, for the bias into ``more``, each unless None."""
    tiles = (length + COLUMNS - 1) // COLUMNS
    chunk = tl.program_id(0).to(tl.int64) // tiles
    i = tl.program_id(0).to(tl.int64) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    there = i < length
    of_weight = tl.zeros((COLUMNS,), tl.float32)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    for row in range(chunk * CHUNK_ROWS, tl.minimum((chunk + 1) * CHUNK_ROWS, rows)):
        g = tl.load(grad + start_of(row, grad_inner, grad_outer, grad_step) + i, mask=there, other=0.0)
        of_bias += g.to(tl.float32)
        if partials is not None:
            h = tl.load(x + start_of(row, x_inner, x_outer, x_step) + i, mask=there, other=0.0)
            n = (h.to(tl.float32) - tl.load(mean + row)) * tl.load(rstd + row)
            of_weight += g.to(tl.float32) * n
    if partials is not None:
        tl.store(partials + chunk * length + i, of_weight, mask=there)
    if more is not None:
        tl.store(more + chunk * length + i, of_bias, mask=there)
