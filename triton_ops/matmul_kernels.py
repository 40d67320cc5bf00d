"""The kernels of ``matmul``: an element is one chain of fp32 over K; by pointers, and by descriptors."""

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["M", "tiles"])
def matmul_descriptor_kernel(
    a, b, bias, out, M, N, K, tiles,
    ACROSS_A: tl.constexpr, ACROSS_B: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same chains over descriptors, whose copies need no registers; beyond the ends they read 0."""
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    # one loop over all steps of all tiles, so that those of the next tile arrive while this one is stored
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        z, row, column = place_of_tile(tile, row_tiles, column_tiles, GROUP)
        row, column = row * BM, column * BN
        sums = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            x = a.load([k0, row]).T if ACROSS_A else a.load([row, k0])
            y = b.load([k0, column]) if ACROSS_B else b.load([column, k0]).T
            sums = tl.dot(x, y, sums)
        store_tile(out, sums, bias, z, row + tl.arange(0, BM), column + tl.arange(0, BN), M, N)
