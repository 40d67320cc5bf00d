"""The product of FP8 with FP8, as rollout engines run it: fp32 sums, and scales where they belong."""

import triton
import triton.language as tl


@triton.jit
def fp8_decoded(codes, FNUZ: tl.constexpr):
    """The bytes of e4m3 as float16, which holds each of their numbers: the exponent starts 8 lower, or 7."""
    magnitude = (codes & 0x7F).to(tl.uint16)
    bits = (magnitude << 7) | ((codes & 0x80).to(tl.uint16) << 8)
    number = bits.to(tl.float16, bitcast=True)
    if FNUZ:
        return tl.where(codes == 0x80, float("nan"), number * 128.0).to(tl.float16)
    return tl.where(magnitude == 0x7F, float("nan"), number * 256.0).to(tl.float16)


@triton.jit
def fp8_step(a, b, y, DECODE: tl.constexpr, FNUZ: tl.constexpr, EXACT: tl.constexpr):
    """``y + a @ b``.

    ``EXACT``: on Hopper, whose tensor cores keep 14 bits of a sum of FP8: of K = 4096 an H200 lost 1e-4.  The
    operands become fp16, whose sum they keep in fp32."""
    if DECODE:
        return tl.dot(fp8_decoded(a, FNUZ), fp8_decoded(b, FNUZ), y)
    else:
        return tl.dot(a, b, y, max_num_imprecise_acc=0 if EXACT else None)


@triton.jit(do_not_specialize=["N", "V", "first"])
def fp8_product_kernel(
    hidden, hidden_scale, hidden_groups: tl.int64, weight, weight_stride: tl.int64,
    weight_scale, weight_groups: tl.int64, out, out_stride: tl.int64, N, V, H, first, block_rows,
    HIDDEN_GROUP: tl.constexpr, WEIGHT_GROUP: tl.constexpr, DECODE: tl.constexpr, FNUZ: tl.constexpr,
    EXACT: tl.constexpr, WHOLE_K: tl.constexpr, ONE_BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # neighbours in the grid take the same entries of the vocabulary, so that the weight is read from L2
    blocks = tl.cdiv(N, BM)
    rows = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) // blocks) * BN + tl.arange(0, BN)
    # what lies beyond the end repeats the last, and is not stored
    row, column = tl.minimum(rows, N - 1).to(tl.int64), tl.minimum(columns, V - 1).to(tl.int64)
    k = tl.arange(0, BK)
    a_ptr = hidden + row[:, None] * H + k[None, :]
    b_ptr = weight + column[None, :] * weight_stride + k[:, None]
    a_scale = hidden_scale + row * hidden_groups
    if ONE_BLOCK:  # all columns share their scales
        block = ((tl.program_id(0) // blocks) * BN + first) // block_rows
        b_scale = weight_scale + block.to(tl.int64) * weight_groups
    else:
        b_scale = weight_scale + ((column + first) // block_rows)[None, :] * weight_groups
    y = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, H, BK):
        if WHOLE_K:
            a, b = tl.load(a_ptr + k0), tl.load(b_ptr + k0)
        else:
            a = tl.load(a_ptr + k0, mask=k[None, :] + k0 < H, other=0 if DECODE else 0.0)
            b = tl.load(b_ptr + k0, mask=k[:, None] + k0 < H, other=0 if DECODE else 0.0)
        if HIDDEN_GROUP is None and WEIGHT_GROUP is None:
            y = fp8_step(a, b, y, DECODE, FNUZ, EXACT)
        else:
            step = fp8_step(a, b, tl.zeros((BM, BN), tl.float32), DECODE, FNUZ, EXACT)
            if WEIGHT_GROUP is None:
                scale = tl.load(a_scale + k0 // HIDDEN_GROUP)[:, None]
            elif HIDDEN_GROUP is None:
                scale = tl.load(b_scale + k0 // WEIGHT_GROUP)
            else:
                a_step = tl.load(a_scale + k0 // HIDDEN_GROUP)[:, None]
                scale = a_step * tl.load(b_scale + k0 // WEIGHT_GROUP)
            y = tl.fma(step, tl.broadcast_to(scale, (BM, BN)), y)
    if HIDDEN_GROUP is None:
        y = y * tl.load(a_scale)[:, None]
    if WEIGHT_GROUP is None:
        y = y * tl.load(b_scale)
    inside = (rows < N)[:, None] & (columns < V)[None, :]
    at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=inside)
