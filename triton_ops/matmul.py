"""``matmul`` over Triton: one chain of fp32 for each element over K in order, whatever the tile around it.

K is split into the segments that a call names and no others, and a step of it has the same length in every
tile and in both kernels: rows and columns of a tile, and how they are loaded, follow the shape, the strides
and the GPU, and change no bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads, MatmulResults
from rlkernel.drivers.matmul import gradients, summed
from rlkernel.triton_ops._descriptors import aligned
from rlkernel.triton_ops._device import generation, processors, taking
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops._tiles import COPIED, LARGE, SMALL, run
from rlkernel.triton_ops.matmul_kernels import matmul_descriptor_kernel, matmul_kernel

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
REACH = 2**31  # in which the kernel counts the elements of a step
VECTOR = 16
# For descriptors, by the GPU's generation, Hopper or Blackwell, and the bytes of an element of the output: on
# its way to memory a tile passes through shared memory, beside the stages. Of fewer rows the one above.
DESCRIBED = {
    9: {2: LARGE, 4: SMALL},
    10: {2: COPIED, 4: SMALL},
}
LEAST_DESCRIBED = 65  # rows and columns


def forward(call: MatmulCall) -> MatmulResults:
    out = summed(_product, call.a, call.b, call.out_dtype, call.bias, call.segments)
    return MatmulResults(out)


def backward(call: MatmulCall, results: MatmulResults, grad: Tensor) -> MatmulGrads:
    return gradients(call, grad, _product)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    batch, rows, columns = *a.shape[:2], b.shape[2]
    out = torch.empty(batch, rows, columns, dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    bias = None if bias is None else bias.contiguous()
    wide = torch.float32 in (a.dtype, b.dtype)  # a gradient in fp32 of operands in 16 bits
    with torch.cuda.device_of(a):
        if not wide and batch == 1 and generation() in DESCRIBED and _describable(a[0], b[0]):
            _by_descriptors(a[0], b[0], bias, out)
        else:
            _by_pointers(a, b, bias, out, wide)
    return out


def _by_pointers(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, wide: bool) -> None:
    (batch, rows, inner), columns = a.shape, b.shape[2]
    bits = 32 if wide else 16
    a, b = _within_reach(a, 2, STEP[bits]), _within_reach(b, 1, STEP[bits])
    dense_rows, dense_columns = _dense(a, 1), _dense(b, 2)
    fast = (dense_rows or _dense(a, 2)) and (dense_columns or _dense(b, 1)) and a.dtype == b.dtype
    tile = next(tile for most, tile in TILES[bits] if most is None or rows <= most) if fast else SLOW
    if dense_columns:  # whose addresses take registers
        tile = tile._replace(columns=min(tile.columns, 64))
    nvidia = torch.version.hip is None
    # AMD's instructions for tiles of 16 and of 32 rows add up in different orders
    instruction = {} if nvidia else {"matrix_instr_nonkdim": 16}
    stages = tile.stages if nvidia else 2  # of 64 KiB of shared memory
    tiles = cdiv(rows, tile.rows) * cdiv(columns, tile.columns) * batch
    matmul_kernel[(min(tiles, 2 * processors(a.device)),)](
        a, *a.stride(), b, *b.stride(), bias, out, rows, columns, inner, tiles,
        WIDE=wide, WHOLE_K=inner % STEP[bits] == 0, DENSE_ROWS=dense_rows, DENSE_COLUMNS=dense_columns,
        BM=tile.rows, BN=tile.columns, BK=STEP[bits], VECTOR=VECTOR, GROUP=GROUP,
        num_warps=tile.warps, num_stages=stages, **instruction,
    )  # fmt: skip


def _within_reach(x: Tensor, dim: int, step: int) -> Tensor:
    """``x``, or a copy of it with K dense where a step along K, ``dim``, is too long for the kernel."""
    if x.shape[dim] <= step or step * x.stride(dim) < REACH:
        return x
    return x.movedim(dim, -1).contiguous().movedim(-1, dim)


def _by_descriptors(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    tile = DESCRIBED[generation()][out.dtype.itemsize]
    if columns <= 128:
        tile = tile._replace(columns=128)
    across_a, across_b = a.stride(1) != 1, b.stride(0) != 1
    tiles = cdiv(rows, tile.rows) * cdiv(columns, tile.columns)
    run(
        matmul_descriptor_kernel, min(tiles, processors(a.device)), a,
        a, a.stride(1 if across_a else 0), b, b.stride(0 if across_b else 1), bias, out, rows, columns, inner,
        ACROSS_A=across_a, ACROSS_B=across_b, SPECIALIZED=tile.specialized,
        BM=tile.rows, BN=tile.columns, BK=tile.step, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _describable(a: Tensor, b: Tensor) -> bool:
    """Whether tiles of both can be copied, and are worth it."""
    large = min(a.shape[0], b.shape[1]) >= LEAST_DESCRIBED and a.shape[1] >= STEP[16]
    return large and all(aligned(x) or aligned(x.t()) for x in (a, b))


def _dense(x: Tensor, dim: int) -> bool:
    """Whether vectors of elements are loaded along this dimension."""
    return x.stride(dim) == 1 and x.shape[dim] % VECTOR == 0
