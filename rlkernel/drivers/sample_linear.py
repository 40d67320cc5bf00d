"""``sample_linear`` in tiles: a library GEMM, then the statistics of a tile that is in the caches.

Shared by the backends that have the two kernels of sampling (``tile_statistics`` and ``finish``: see
``rlkernel.native.sampling``).  The statistics of 4096 tokens are the same in any tile that starts at a
multiple of 4096, so tiles change nothing but the memory they take.

FLOPs: one GEMM, 2 N H V.  Bytes beside it: the statistics read each tile once, and 1 / 40 of it is written;
where a row may be filtered the logits stay in memory, and the second pass reads the groups that can matter.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults, stored_dtype, transforms
from rlkernel.calls.sampling import SPLIT, Scratch
from rlkernel.drivers.linear_products import dense, rows_of
from rlkernel.drivers.linear_tiles import operand_dtype, product_kind
from rlkernel.runtime import workspace
from rlkernel.runtime.workspace import Carver

PIECE = 64


class Plan(NamedTuple):
    """From V, H, dtypes and the limit; never from N, nor from what is asked of the logits."""

    rows: int  # of a tile
    vocab: int  # of a tile, a multiple of SPLIT
    piece: int  # rows of the weight that are converted at a time; 0: they are operands as they are


# The most that helps: on a CPU a tile stays in the caches; a GPU fills its multiprocessors in few waves.
CPU_TILE = (256, SPLIT)
GPU_TILE = (2048, 8 * SPLIT)


def plan(weight: Tensor, head: Head) -> Plan:
    device = weight.device
    operand, stage = operand_dtype(head.compute_dtype, device), _stage_dtype(head, device)
    convert = weight.dtype != operand or operand != head.compute_dtype or weight.stride(-1) != 1
    cell = stored_dtype(head).itemsize + (0 if stage is None else stage.itemsize)
    most = CPU_TILE if device.type == "cpu" else GPU_TILE
    return _plan(*weight.shape, operand.itemsize, convert, cell, most, workspace.limit(device))


@functools.lru_cache
def _plan(
    vocab: int, size: int, operand: int, convert: bool, cell: int, most: tuple[int, int], limit: int
) -> Plan:
    """``operand`` and ``cell``: bytes of an element of the weight, and of the logits."""
    most_rows, most_vocab = most
    wide = min(-(-vocab // SPLIT) * SPLIT, most_vocab)
    piece = min(max(limit // 2 // (size * operand) // PIECE, 1) * PIECE, wide) if convert else 0
    while wide > SPLIT and 64 * wide * cell > limit // 4:
        wide = max(wide // 2 // SPLIT, 1) * SPLIT
    room = limit - piece * size * operand
    rows = max(room // (wide * cell + size * operand), 16)
    return Plan(int(min(rows, most_rows)), wide, piece)


def unsupported(kernels: Any, hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> list[str]:
    """The reasons of the kernels for not taking the logits of this product."""
    compute = options.pop("compute_dtype", None) or torch.promote_types(hidden.dtype, weight.dtype)
    dtype = compute if compute == torch.float64 else torch.float32
    return kernels.unsupported(torch.empty(0, weight.shape[0], dtype=dtype, device=hidden.device), **options)


def forward(kernels: Any, call: SampleLinearCall) -> SampleLinearResults:
    hidden, weight, _, request, drawn, store = call[:6]
    n, vocab = hidden.shape[0], weight.shape[0]
    logits = hidden.new_empty(n, vocab, dtype=stored_dtype(call.head)) if store else None
    if not drawn:
        for _ in tiles(call, logits):
            pass
        return SampleLinearResults(logits)
    scratch = Scratch.of(n, vocab, request, hidden.device)
    for a, b, v0, tile in tiles(call, logits):
        part = (request, scratch) if b - a == n else (request.of_rows(a, b), scratch.of_rows(a, b))
        kernels.tile_statistics(tile, None, v0, *part)
    return SampleLinearResults(logits, *kernels.finish(logits, None, request, scratch))


def _stage_dtype(head: Head, device: torch.device) -> torch.dtype | None:
    """Of a tile beside the tile, where the product lands before it is rounded to ``logits_dtype``, or that
    rounds it; None where the GEMM rounds, or nothing does."""
    if head.logits_dtype == torch.float32:
        return None
    if transforms(head):
        return head.logits_dtype
    by_gemm = product_kind(head.compute_dtype, device) == "out_dtype"
    return None if by_gemm else operand_dtype(head.compute_dtype, device)


def tiles(call: SampleLinearCall, logits: Tensor | None) -> Iterator[tuple[int, int, int, Tensor]]:
    """(first row, row behind the last, first token, logits) of each tile, in memory that the next one takes,
    or in ``logits``.  The vocabulary is outside: a slice of the weight is read and converted once."""
    hidden, weight, head = call[:3]
    n, (vocab, size) = hidden.shape[0], weight.shape
    if n == 0:
        return
    chosen = plan(weight, head)
    operand = operand_dtype(head.compute_dtype, hidden.device)
    stage_dtype = _stage_dtype(head, hidden.device)
    rows, wide = min(chosen.rows, n), min(chosen.vocab, vocab)
    convert = hidden.dtype != operand or operand != head.compute_dtype or hidden.stride(-1) != 1
    bias = None if head.bias is None else head.bias.float()

    def carve(carver: Carver) -> tuple[Tensor | None, ...]:
        part = carver.part
        return (
            part(rows, wide, dtype=stored_dtype(head)) if logits is None else None,
            part(rows, min(chosen.piece or wide, wide), dtype=stage_dtype) if stage_dtype else None,
            part(min(chosen.piece, wide), size, dtype=operand) if chosen.piece else None,
            part(rows, size, dtype=operand) if convert else None,
        )

    counted = Carver()
    carve(counted)
    with workspace.lease(counted.size, hidden.device) as (memory, _, _):
        own, stage, weights, hiddens = carve(Carver(memory))
        converted = held = None  # which rows of the weight, and of hidden, the workspace has
        for v0 in range(0, vocab, chosen.vocab):
            v1 = min(v0 + chosen.vocab, vocab)
            for a in range(0, n, rows):
                b = min(a + rows, n)
                h = rows_of(hidden, a, b) if hiddens is None else hiddens[: b - a]
                if hiddens is not None and held != a:
                    h.copy_(hidden[a:b].to(head.compute_dtype))
                    held = a
                tile = logits[a:b, v0:v1] if own is None else dense(own, b - a, v1 - v0)  # type: ignore[index]
                step = chosen.piece or v1 - v0
                for w0 in range(v0, v1, step):
                    w1 = min(w0 + step, v1)
                    w = weight[w0:w1] if weights is None else weights[: w1 - w0]
                    if weights is not None and converted != w0:
                        w.copy_(weight[w0:w1].to(head.compute_dtype))
                        converted = w0
                    _multiply(h, w, head, tile[:, w0 - v0 : w1 - v0], stage)
                _transform(tile, head, None if bias is None else bias[v0:v1])
                yield a, b, v0, tile


def _multiply(h: Tensor, w: Tensor, head: Head, out: Tensor, stage: Tensor | None) -> None:
    """``h @ w.T``, rounded to ``logits_dtype``, in the dtype of ``out``."""
    beside = None if stage is None else dense(stage, *out.shape)
    if product_kind(head.compute_dtype, h.device) == "out_dtype":
        if head.logits_dtype == torch.float32:
            torch.ops.aten.mm.dtype_out(h, w.T, torch.float32, out=out)
        elif beside is None:
            torch.mm(h, w.T, out=out)
        else:
            out.copy_(torch.mm(h, w.T, out=beside))
    elif beside is not None and beside.dtype != head.logits_dtype:
        out.copy_(torch.mm(h, w.T, out=beside))
    else:
        torch.mm(h, w.T, out=out)
        if beside is not None:
            out.copy_(beside.copy_(out))


def _transform(tile: Tensor, head: Head, bias: Tensor | None) -> None:
    if bias is not None:
        tile.add_(bias)
    if head.logit_scale != 1.0:
        tile.mul_(head.logit_scale)
    if head.softcap is not None:
        tile.div_(head.softcap).tanh_().mul_(head.softcap)
