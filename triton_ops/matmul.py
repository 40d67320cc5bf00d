"""``matmul`` over Triton: one chain of fp32 for each element over K in order, whatever the tile around it.

K is split into the segments that a call names and no others, and a step of it has the same length in every
tile: the rows and columns of a tile follow the shape, and change no bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads, MatmulResults
from rlkernel.drivers.matmul import gradients, summed
from rlkernel.triton_ops._device import taking

unsupported = taking("a")

GROUP = 8  # tiles of rows that share a column's tile while it is in L2


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


# by the number of rows up to which one is taken, for operands of 16 bits and of 32
TILES = {
    16: ((16, Tile(16, 64, 4, 4)), (64, Tile(64, 64, 4, 4)), (None, Tile(128, 128, 8, 3))),
    32: ((16, Tile(16, 32, 4, 2)), (64, Tile(64, 32, 4, 2)), (None, Tile(64, 64, 4, 2))),
}
SLOW = Tile(32, 32, 4, 2)  # of operands whose elements are loaded or converted one by one
STEP = {16: 64, 32: 32}  # of K, in elements
VECTOR = 16


def forward(call: MatmulCall) -> MatmulResults:
    out = summed(_product, call.a, call.b, call.out_dtype, call.bias, call.segments)
    return MatmulResults(out)


def backward(call: MatmulCall, results: MatmulResults, grad: Tensor) -> MatmulGrads:
    return gradients(call, grad, _product)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    (batch, rows, inner), columns = a.shape, b.shape[2]
    out = torch.empty(batch, rows, columns, dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    wide = torch.float32 in (a.dtype, b.dtype)  # a gradient in fp32 of operands in 16 bits
    bits = 32 if wide else 16
    dense_rows, dense_columns = _dense(a, 1), _dense(b, 2)
    fast = (dense_rows or _dense(a, 2)) and (dense_columns or _dense(b, 1)) and a.dtype == b.dtype
    tile = next(tile for most, tile in TILES[bits] if most is None or rows <= most) if fast else SLOW
    if dense_columns:  # whose addresses take registers
        tile = tile._replace(columns=min(tile.columns, 64))
    nvidia = torch.version.hip is None
    # AMD's instructions for tiles of 16 and of 32 rows add up in different orders
    instruction = {} if nvidia else {"matrix_instr_nonkdim": 16}
    stages = tile.stages if nvidia else 2  # of 64 KiB of shared memory
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) * batch
    with torch.cuda.device_of(a):
        matmul_kernel[(min(tiles, _programs(a.device)),)](
            a, *a.stride(), b, *b.stride(), bias, out, rows, columns, inner, tiles,
            WIDE=wide, WHOLE_K=inner % STEP[bits] == 0, DENSE_ROWS=dense_rows, DENSE_COLUMNS=dense_columns,
            BM=tile.rows, BN=tile.columns, BK=STEP[bits], VECTOR=VECTOR, GROUP=GROUP,
            num_warps=tile.warps, num_stages=stages, **instruction,
        )  # fmt: skip
    return out


def _dense(x: Tensor, dim: int) -> bool:
    """Whether vectors of elements are loaded along this dimension."""
    return x.stride(dim) == 1 and x.shape[dim] % VECTOR == 0


def _programs(device: torch.device) -> int:
    """As many as run at a time: each takes tile after tile, and which one takes a tile changes no bit."""
    if device.type != "cuda":
        return 8
    properties: Any = torch.cuda.get_device_properties(device)
    return 2 * int(properties.multi_processor_count)


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
        z = (tile // (row_tiles * column_tiles)).to(tl.int64)
        inside = tile % (row_tiles * column_tiles)
        first = inside // (GROUP * column_tiles) * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        rows = (first + inside % (GROUP * column_tiles) % height) * BM + tl.arange(0, BM)
        columns = inside % (GROUP * column_tiles) // height * BN + tl.arange(0, BN)
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
        if bias is not None:
            sums += tl.load(bias + tl.minimum(columns, N - 1)).to(tl.float32)[None, :]
        place = (z * M + rows[:, None]) * N + columns[None, :]
        kept = (rows < M)[:, None] & (columns < N)[None, :]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=kept)
