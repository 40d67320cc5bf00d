"""``sampling`` over Triton: one read of the logits, then one program a row that finishes.

Also the two kernels one by one: ``sample_linear`` takes the statistics of its tiles, ``logprob`` those of a
filtered row.  Block sizes follow from V and the dtype alone.
"""

import ctypes

import torch
from torch import Tensor

from rlkernel.calls.sampling import (
    FILTER_ORDERS,
    GROUP,
    RANK_TIES,
    SPLIT,
    SampleStats,
    Sampling,
    SamplingCall,
    Scratch,
)
from rlkernel.triton_ops._device import taking_logits
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.sampling_finish_kernels import finish_kernel
from rlkernel.triton_ops.sampling_kernels import statistics_kernel

unsupported = taking_logits
ROOM = 2048  # tokens that fit the registers of a program of pass B


def forward(call: SamplingCall) -> SampleStats:
    logits, adjusted, request, _ = call
    scratch = Scratch.of(logits.shape[0], logits.shape[1], request, logits.device)
    tile_statistics(logits, adjusted, 0, request, scratch)
    return finish(logits, adjusted, request, scratch)


def tile_statistics(
    tile: Tensor, adjusted: Tensor | None, vocab_start: int, request: Sampling, scratch: Scratch
) -> None:
    """Leave in ``scratch`` what the ``tile`` [B, Vt] of the tokens from ``vocab_start`` on says, which is a
    multiple of ``SPLIT``."""
    rows, width = tile.shape
    if tile.numel() == 0:
        return
    vocab, records, group_max = scratch
    # 16 bytes a thread and load; the bits do not depend on it
    vec = 16 // (tile.element_size() if adjusted is None else 4)
    splits = cdiv(width, SPLIT)
    with torch.cuda.device_of(tile):
        statistics_kernel[(rows * splits,)](
            tile, tile.stride(0), *_rows_of(adjusted), *_rows_of(request.token_bitmask),
            width, vocab_start, splits, cdiv(vocab, SPLIT), cdiv(vocab, GROUP),
            *per_row(request.temperature), request.seeds, request.positions, request.token_ids,
            request.skip, records, group_max,
            RAW=request.raw, ENTROPY=request.entropy or request.thresholds is not None,
            SIGMA=request.may_use_sigma, GUMBEL=request.gumbel, SCATTERED=_scattered(tile, adjusted),
            LANES=SPLIT // vec, VEC=vec, num_warps=8 if request.may_use_sigma or request.gumbel else 4,
            enable_fp_fusion=False,
        )  # fmt: skip


def finish(
    logits: Tensor | None, adjusted: Tensor | None, request: Sampling, scratch: Scratch
) -> SampleStats:
    """The rows' results from the statistics of all their tiles.  ``logits`` [B, V] may be None where no row
    can be filtered and no rank is wanted."""
    vocab, records, group_max = scratch
    rows, device = len(records), records.device
    stats = SampleStats.empty(rows, request, device)
    if rows == 0:
        return stats
    filters = request.may_filter(vocab)
    groups = cdiv(vocab, GROUP)
    rereads = filters or request.rank
    listed = torch.empty(rows, groups, dtype=torch.int32, device=device) if rereads else None
    candidates = torch.empty(rows, ROOM, dtype=torch.float32, device=device) if filters else None
    top_k = request.top_k if isinstance(request.top_k, Tensor) else min(request.top_k, vocab)
    warps = 1
    if rereads:  # entries that are loaded one by one take more registers: fewer of them a thread
        warps = 16 if vocab > SPLIT and _scattered(logits, adjusted) else 8
    with torch.cuda.device_of(records):
        finish_kernel[(rows,)](
            *_rows_of(logits if rereads else None), *_rows_of(adjusted if rereads else None),
            *_rows_of(request.token_bitmask), vocab, cdiv(vocab, SPLIT), groups,
            *per_row(request.temperature), *((top_k, 0) if isinstance(top_k, Tensor) else (None, top_k)),
            *per_row(request.top_p), *per_row(request.min_p), *per_row(request.top_n_sigma),
            request.thresholds, request.band, request.seeds, request.positions, request.token_ids,
            request.skip, records, group_max,
            *stats[:9], request.support, *stats[9:], listed, candidates,
            FILTER=filters, ORDER=FILTER_ORDERS.index(request.order),
            TIES=RANK_TIES.index(request.rank_ties), GUMBEL=request.gumbel,
            GREEDY_SOFTMAX=request.greedy_softmax,
            SPLITS=next_power_of_2(cdiv(vocab, SPLIT)),
            GROUPS=max(64, min(1024, next_power_of_2(groups))), ROOM=ROOM,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return stats


def _scattered(*tensors: Tensor | None) -> bool:
    """Whether rows start at other than multiples of 16 elements."""
    present = [t for t in tensors if t is not None]
    return any(x % 16 for t in present for x in (t.shape[1], *t.stride()[:-1], t.data_ptr()))


def _rows_of(x: Tensor | None) -> tuple[Tensor | None, int]:
    return x, 0 if x is None else x.stride(0)


def per_row(x: float | Tensor) -> tuple[Tensor | None, float]:
    """All numbers are fp32 in the kernels, one for all rows or one for each."""
    return (x, 1.0) if isinstance(x, Tensor) else (None, ctypes.c_float(x).value)
