"""``sample_linear(algorithm="fused")``: tokens drawn from tiles of logits that are never in memory.

| pass | operations | bytes |
|---|---|---|
| draw: product, and of each tile what it says | ``2 N H V`` | the weight, for each 16 blocks of rows |
| records: of 4096 tokens, from their tiles | | 36 for each tile and row |
| finish: that of ``sampling`` | | 104 for each record |

A grid has no more programs than there are multiprocessors, and each takes tile after tile: 64 rows keep a GPU
as busy as 8192.  Tiles are cut from V alone, and their sums are those of each row, so a row's bits follow
neither the other rows nor the workspace.
"""

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults
from rlkernel.calls.sampling import SPLIT, Sampling, Scratch
from rlkernel.runtime import workspace
from rlkernel.runtime.workspace import Carver
from rlkernel.triton_ops import sample_linear_kernels as kernels
from rlkernel.triton_ops import sampling
from rlkernel.triton_ops._device import processors
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops._tiles import (
    COPIED,
    LARGE,
    NARROW,
    SMALL,
    Launch,
    launch_of,
    leased,
    or_none,
    run,
    tl_type,
)

ENTRIES = 512  # tiles times rows of a program that makes records: what holds them in registers
# What holds its values in registers, by generation.
DESCRIBED = {9: SMALL, 10: COPIED._replace(columns=128, stages=4)}
CROWDED = {9: SMALL, 10: NARROW}  # a bias or a softcap
NOISY = {9: NARROW, 10: NARROW}  # the noise of every token


def forward(call: SampleLinearCall) -> SampleLinearResults:
    hidden, weight, head, request = call[:4]
    (n, size), vocab = hidden.shape, weight.shape[0]
    scratch = Scratch.of(n, vocab, request, hidden.device)
    bias = None if head.bias is None else head.bias.float().contiguous()
    operand = head.compute_dtype
    gathered = hidden.dtype != operand or not hidden.is_contiguous() or hidden.data_ptr() % 16 != 0
    tiles = cdiv(vocab, NARROW.columns)  # the most there may be
    row_bytes = 4 * len(kernels.Said) * tiles + (size * operand.itemsize if gathered else 0)
    chunk = _rows(row_bytes, workspace.limit(hidden.device))
    rows = min(chunk, n)

    def carve(carver: Carver) -> tuple[Tensor, Tensor]:
        states = carver.part(rows if gathered else 0, size, dtype=operand)
        return states, carver.part(rows * len(kernels.Said) * tiles, dtype=torch.float32)

    with leased(carve, hidden.device) as (states, said):
        for a in range(0, n, chunk):
            b = min(a + chunk, n)
            h = states[: b - a].copy_(hidden[a:b]) if gathered else hidden[a:b]
            launch = _launch(h, weight, head, request)
            part = request if b - a == n else request.of_rows(a, b)
            records = scratch.records[a:b]
            _draw(h, call, bias, part, launch, said)
            _record(part, vocab, launch, said, records)
    return SampleLinearResults(None, *sampling.finish(None, None, request, scratch))


def _rows(row_bytes: int, limit: int) -> int:
    """How many rows the workspace has room for, in whole blocks."""
    return max(limit // (row_bytes * LARGE.rows), 1) * LARGE.rows


def _launch(h: Tensor, w: Tensor, head: Head, request: Sampling) -> Launch:
    crowded = head.bias is not None or head.softcap is not None
    tiles = NOISY if request.gumbel else CROWDED if crowded else DESCRIBED
    return launch_of(h, w, head.compute_dtype, tiles, NARROW)


def _draw(
    h: Tensor, call: SampleLinearCall, bias: Tensor | None, request: Sampling, launch: Launch,
    said: Tensor,
) -> None:  # fmt: skip
    head, w, (n, size) = call.head, call.weight, h.shape
    run(
        kernels.draw_kernel, min(launch.blocks(n, len(w)), processors(h.device)), h,
        h, h.stride(0), w, w.stride(0), n, len(w), size, *sampling.per_row(request.temperature),
        request.seeds, request.positions, bias, or_none(head.logit_scale), head.softcap, said,
        RAW=_raw(request), ENTROPY=request.entropy, GUMBEL=request.gumbel,
        COMPUTE=tl_type(head.compute_dtype), LOGITS=tl_type(head.logits_dtype), **launch.options,
    )  # fmt: skip


def _record(request: Sampling, vocab: int, launch: Launch, said: Tensor, records: Tensor) -> None:
    n, splits = records.shape[:2]
    columns = launch.tile.columns
    rows = ENTRIES * columns // SPLIT
    run(
        kernels.record_kernel, cdiv(n, rows) * splits, said,
        said, n, vocab, cdiv(vocab, columns), splits, *sampling.per_row(request.temperature), records,
        RAW=_raw(request), ENTROPY=request.entropy, BN=columns, ROWS=rows,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _raw(request: Sampling) -> bool:
    """Whether the sums of the logits as given are other sums."""
    return request.raw and (isinstance(request.temperature, Tensor) or request.temperature != 1.0)
