"""The main loop that ``linear_logprob``, ``sample_linear`` and ``matmul`` share, and the order of its tiles.

Tiles are copied by tensor descriptors where the GPU has them, and by a warp of its own where ``SPECIALIZED``;
such a loop stands alone, so nothing around it branches, and its descriptors are made in the kernel: those of
the host fail in Triton's pass for Hopper.  Around it may be a loop over tiles: the warp that copies runs
through both.
"""

import triton
import triton.language as tl


@triton.jit
def tile_product(
    a, a_stride, b, b_stride, first_row, first_column, rows, columns, upto, y,
    ACROSS_A: tl.constexpr, ACROSS_B: tl.constexpr,
    COMPUTE: tl.constexpr, DESCRIBED: tl.constexpr, WHOLE_K: tl.constexpr, SPECIALIZED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``y`` plus the product of a block of rows and a block of columns over the first ``upto`` of K.

    An operand has its K in the inner dimension, or ACROSS it.  Beyond ``rows`` and ``columns`` the last is
    repeated, or there is 0: what stands there is not looked at.
    """
    if DESCRIBED:
        for k in tl.range(0, upto, BK, warp_specialize=SPECIALIZED):
            if ACROSS_A:
                left = a.load([k, first_row]).T
            else:
                left = a.load([first_row, k])
            if ACROSS_B:
                right = b.load([k, first_column])
            else:
                right = b.load([first_column, k]).T
            y = tl.dot(left, right, y)
    else:
        k = tl.arange(0, BK)
        row = tl.minimum(first_row + tl.arange(0, BM), rows - 1).to(tl.int64)
        column = tl.minimum(first_column + tl.arange(0, BN), columns - 1).to(tl.int64)
        a_step = a_stride if ACROSS_A else 1
        b_step = b_stride if ACROSS_B else 1
        a_ptr = a + row[:, None] * (1 if ACROSS_A else a_stride) + k[None, :].to(tl.int64) * a_step
        b_ptr = b + column[None, :] * (1 if ACROSS_B else b_stride) + k[:, None].to(tl.int64) * b_step
        for start in range(0, upto, BK):
            if WHOLE_K:
                left = tl.load(a_ptr)
                right = tl.load(b_ptr)
            else:
                left = tl.load(a_ptr, mask=k[None, :] + start < upto, other=0.0)
                right = tl.load(b_ptr, mask=k[:, None] + start < upto, other=0.0)
            y = tl.dot(left.to(COMPUTE), right.to(COMPUTE), y)
            a_ptr += BK * a_step
            b_ptr += BK * b_step
    return y


@triton.jit
def tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Which tile of the rows and of the columns: down GROUP of the rows, then to the next of the columns."""
    first = tile // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = tile - first * column_tiles
    return first + inside % height, inside // height
