"""Around vendors' attention over shared prefixes: merge, gather and the sum of gradients in a fixed order.

Each has the bits of its twin in csrc/include/rlkernel/prefix_shared_attention/kernel.cuh: an element sees no
other, sums go by the table, and no multiplication is fused with an addition but where that says so
(``enable_fp_fusion=False``).  All three move bytes and do little else.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops._exact import exp_exact, log_exact, max_or_nan


@triton.jit
def without_empty(lse):
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def share_of(lse, top):
    """exp(lse - top).  It is 1 where both are +inf: a sink that takes all."""
    d = lse - top
    return tl.where(lse == top, 1.0, tl.where(d < -87.0, 0.0, exp_exact(d)))


@triton.jit
def tile_of(program, rows, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The head and the rows of a program, and which of them there are; heads follow one another."""
    row = program // HEADS * ROWS + tl.arange(0, ROWS)
    return (program % HEADS).to(tl.int64), row.to(tl.int64), row < rows


@triton.jit(
    do_not_specialize=["lse_stride", "part_lse_stride", "rows"],
    do_not_specialize_on_alignment=["lse", "part_lse"],  # of rows that start anywhere
)
def around_merge_kernel(
    out, out_stride, out_head, lse, lse_stride: tl.int64, part, part_stride, part_head,
    part_lse, part_lse_stride: tl.int64, sinks, rows,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, row, there = tile_of(tl.program_id(0), rows, HEADS, ROWS)
    at_lse = lse + head * lse_stride + row
    a = without_empty(tl.load(at_lse, mask=there, other=0.0))
    b = tl.full((ROWS,), float("-inf"), tl.float32)
    sink = tl.full((ROWS,), float("-inf"), tl.float32)
    if part is not None:
        b = without_empty(tl.load(part_lse + head * part_lse_stride + row, mask=there, other=0.0))
    if sinks is not None:
        sink = tl.full((ROWS,), tl.load(sinks + head), tl.float32)
    top = max_or_nan(max_or_nan(a, b), sink)
    top = tl.where(top == float("-inf"), 0.0, top)  # then every share is 0
    ea = share_of(a, top)
    eb = share_of(b, top)
    total = ea + eb + share_of(sink, top)
    inverse = tl.where(total == 0.0, 0.0, tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), total))
    tl.store(at_lse, top + log_exact(total), mask=there)
    w = tl.broadcast_to((ea * inverse)[:, None], (ROWS, WIDTH))
    part_w = tl.broadcast_to((eb * inverse)[:, None], (ROWS, WIDTH))
    column = tl.arange(0, WIDTH)[None, :]
    fits = there[:, None] & (column < D)
    at = out + row[:, None] * out_stride + head * out_head + column
    x = tl.load(at, mask=fits & (w != 0.0), other=0.0).to(tl.float32)  # 0 * inf would be NaN
    y = tl.zeros((ROWS, WIDTH), tl.float32)
    if part is not None:
        at_part = part + row[:, None] * part_stride + head * part_head + column
        y = tl.load(at_part, mask=fits & (part_w != 0.0), other=0.0).to(tl.float32)
    tl.store(at, tl.fma(part_w, y, w * x).to(out.dtype.element_ty), mask=fits)


@triton.jit
def copy_rows(
    source, stride, head_stride, index, rows, out, program,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, row, there = tile_of(program, rows, HEADS, ROWS)
    found = tl.load(index + row, mask=there, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    fits = there[:, None] & (column < D)
    x = tl.load(source + found[:, None] * stride + head * head_stride + column, mask=fits)
    tl.store(out + (row * HEADS + head)[:, None] * D + column, x, mask=fits)


@triton.jit(do_not_specialize=["rows"])
def around_gather_kernel(
    k, k_stride, k_head, v, v_stride, v_head, index, rows, out_k, out_v,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[i] = source[index[i]]`` of keys by even programs, of values by odd ones."""
    program = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        copy_rows(k, k_stride, k_head, index, rows, out_k, program, HEADS, D, WIDTH, ROWS)
    else:
        copy_rows(v, v_stride, v_head, index, rows, out_v, program, HEADS, D, WIDTH, ROWS)


@triton.jit
def sum_rows(
    source, index, offsets, rows, out, program,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, row, there = tile_of(program, rows, HEADS, ROWS)
    begin = tl.load(offsets + row, mask=there, other=0)
    count = tl.load(offsets + row + 1, mask=there, other=0) - begin
    column = tl.arange(0, WIDTH)[None, :]
    fits = column < D
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(tl.max(count, 0)):
        more = i < count
        place = tl.load(index + begin + i, mask=more, other=0)
        at = source + (place * HEADS + head)[:, None] * D + column
        total += tl.load(at, mask=more[:, None] & fits, other=0.0).to(tl.float32)
    at = out + (row * HEADS + head)[:, None] * D + column
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None] & fits)


@triton.jit(do_not_specialize=["rows"])
def around_reduce_kernel(
    source_k, source_v, index, offsets, rows, out_k, out_v,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[r]``: the sum of ``source[index[offsets[r]:offsets[r + 1]]]`` in that order, in fp32."""
    program = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        sum_rows(source_k, index, offsets, rows, out_k, program, HEADS, D, WIDTH, ROWS)
    else:
        sum_rows(source_v, index, offsets, rows, out_v, program, HEADS, D, WIDTH, ROWS)
