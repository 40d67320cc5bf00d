"""The Triton kernel of ``rotary``: a program takes some heads of a token; no pair sees another."""

import triton
import triton.language as tl


@triton.jit
def angle_at(table, i, there, out, ROUND_EACH: tl.constexpr):
    x = tl.load(table + i, mask=there, other=0.0).to(tl.float32)
    if ROUND_EACH:
        x = x.to(out.dtype.element_ty).to(tl.float32)
    return x[None, :]


@triton.jit
def turned(x, cos, partner, sin, out, ROUND_EACH: tl.constexpr):
    a, b = x * cos, partner * sin
    if ROUND_EACH:
        a = a.to(out.dtype.element_ty).to(tl.float32)
        b = b.to(out.dtype.element_ty).to(tl.float32)
    return (a + b).to(out.dtype.element_ty)


@triton.jit(
    do_not_specialize=["x_outer", "out_outer", "cos_outer", "sin_outer", "inner", "heads"],
)
def rotary_kernel(
    x, x_outer: tl.int64, x_inner: tl.int64, x_head: tl.int64,
    out, out_outer: tl.int64, out_inner: tl.int64, out_head: tl.int64,
    cos, cos_outer: tl.int64, cos_inner: tl.int64, sin, sin_outer: tl.int64, sin_inner: tl.int64,
    positions, inner: tl.int64, heads: tl.int64, ROTARY_DIM: tl.constexpr, REST: tl.constexpr,
    HALF_TABLE: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND_EACH: tl.constexpr, INVERSE: tl.constexpr,
    PAIRS: tl.constexpr, MORE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    groups = (heads + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64) // groups
    head = tl.program_id(0).to(tl.int64) % groups * HEADS + tl.arange(0, HEADS)[:, None]
    x += token // inner * x_outer + token % inner * x_inner
    out += token // inner * out_outer + token % inner * out_inner
    if positions is None:
        cos += token // inner * cos_outer + token % inner * cos_inner
        sin += token // inner * sin_outer + token % inner * sin_inner
    else:
        row = tl.load(positions + token)
        cos += row * cos_inner
        sin += row * sin_inner
    pair = tl.arange(0, PAIRS)
    turns = pair < ROTARY_DIM // 2
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else ROTARY_DIM // 2)
    at_first = pair if HALF_TABLE else first
    at_second = pair if HALF_TABLE else second
    there = (head < heads) & turns[None, :]
    a = tl.load(x + head * x_head + first[None, :], mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + head * x_head + second[None, :], mask=there, other=0.0).to(tl.float32)
    of_first = angle_at(sin, at_first, turns, out, ROUND_EACH)
    of_second = angle_at(sin, at_second, turns, out, ROUND_EACH)
    sin_a = of_second if INVERSE else -of_first
    sin_b = -of_first if INVERSE else of_second
    y = turned(a, angle_at(cos, at_first, turns, out, ROUND_EACH), b, sin_a, out, ROUND_EACH)
    z = turned(b, angle_at(cos, at_second, turns, out, ROUND_EACH), a, sin_b, out, ROUND_EACH)
    tl.store(out + head * out_head + first[None, :], y, mask=there)
    tl.store(out + head * out_head + second[None, :], z, mask=there)
    if MORE:  # what does not turn
        i = tl.arange(0, MORE)[None, :]
        there = (head < heads) & (i < REST)
        rest = tl.load(x + head * x_head + ROTARY_DIM + i, mask=there)
        tl.store(out + head * out_head + ROTARY_DIM + i, rest, mask=there)
