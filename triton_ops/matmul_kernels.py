"""The kernels of ``matmul``: an element is one chain of fp32 over K; by pointers, and by descriptors."""

import triton
import triton.language as tl

from rlkernel.triton_ops._tile_product import tile_place, tile_product


@triton.jit
def place_of_tile(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Which matrix of the batch, and which tile of its rows and of its columns."""
    inside = tile % (row_tiles * column_tiles)
    first = inside // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row = first + inside % (GROUP * column_tiles) % height
    return (tile // (row_tiles * column_tiles)).to(tl.int64), row, inside % (GROUP * column_tiles) // height


@triton.jit
def store_tile(out, sums, bias, z, rows, columns, M, N):
    if bias is not None:
        sums += tl.load(bias + tl.minimum(columns, N - 1)).to(tl.float32)[None, :]
    place = (z * M + rows[:, None]) * N + columns[None, :]
    kept = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def place_of(index, size, DENSE: tl.constexpr, VECTOR: tl.constexpr):
    """Where rows are read, and which of them; those beyond the end are not stored."""
    if DENSE:  # a bound that the compiler can divide, so that it keeps vectors whole
        return index.to(tl.int64), index < size // VECTOR * VECTOR
    return tl.minimum(index, size - 1).to(tl.int64), index >= 0  # the last again


@triton.jit
def load_step(x, kept, in_k, DENSE: tl.constexpr, WHOLE_K: tl.constexpr):
    """A mask that keeps all costs registers: each load has those that it needs."""
    if WHOLE_K:
        return tl.load(x, mask=kept, other=0.0) if DENSE else tl.load(x)
    return tl.load(x, mask=(kept & in_k) if DENSE else in_k, other=0.0)


@triton.jit(do_not_specialize=["M", "tiles"])
def matmul_kernel(
    a, a_batch: tl.int64, a_row, a_step, b, b_batch: tl.int64, b_step, b_column, bias, out, M, N, K, tiles,
    WIDE: tl.constexpr, WHOLE_K: tl.constexpr, DENSE_ROWS: tl.constexpr, DENSE_COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        z, rows, columns = place_of_tile(tile, row_tiles, column_tiles, GROUP)
        rows = rows * BM + tl.arange(0, BM)
        columns = columns * BN + tl.arange(0, BN)
        row, a_kept = place_of(rows, M, DENSE_ROWS, VECTOR)
        column, b_kept = place_of(columns, N, DENSE_COLUMNS, VECTOR)
        a_ptr = a + z * a_batch + row[:, None] * a_row + k[None, :].to(tl.int64) * a_step
        b_ptr = b + z * b_batch + column[None, :] * b_column + k[:, None].to(tl.int64) * b_step
        sums = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            x = load_step(a_ptr, a_kept[:, None], k[None, :] + k0 < K, DENSE_ROWS, WHOLE_K)
            y = load_step(b_ptr, b_kept[None, :], k[:, None] + k0 < K, DENSE_COLUMNS, WHOLE_K)
            if WIDE:
                sums = tl.dot(x.to(tl.float32), y.to(tl.float32), sums, input_precision="ieee")
            else:
                sums = tl.dot(x, y, sums)
            a_ptr += BK * a_step
            b_ptr += BK * b_step
        store_tile(out, sums, bias, z, rows, columns, M, N)


@triton.jit(do_not_specialize=["M"])
def matmul_descriptor_kernel(
    a, a_stride: tl.int64, b, b_stride: tl.int64, bias, out, M, N, K,
    ACROSS_A: tl.constexpr, ACROSS_B: tl.constexpr, SPECIALIZED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same chains over descriptors, whose copies need no registers; beyond the ends they read 0."""
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    if ACROSS_A:
        a = tl.make_tensor_descriptor(a, [K, M], [a_stride, 1], [BK, BM])
    else:
        a = tl.make_tensor_descriptor(a, [M, K], [a_stride, 1], [BM, BK])
    if ACROSS_B:
        b = tl.make_tensor_descriptor(b, [K, N], [b_stride, 1], [BK, BN])
    else:
        b = tl.make_tensor_descriptor(b, [N, K], [b_stride, 1], [BN, BK])
    # what the next tile needs arrives while this one is stored
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row, column = tile_place(tile, row_tiles, column_tiles, GROUP)
        sums = tile_product(
            a, a_stride, b, b_stride, row * BM, column * BN, M, N, K, tl.zeros((BM, BN), tl.float32),
            ACROSS_A, ACROSS_B, tl.float32, True, True, SPECIALIZED, BM, BN, BK,
        )  # fmt: skip
        rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        store_tile(out, sums, bias, 0, rows.to(tl.int64), columns, M, N)
