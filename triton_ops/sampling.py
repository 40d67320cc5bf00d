"""``sampling`` over Triton: one read of the logits, then one program a row that finishes.

Also the two kernels one by one: ``sample_linear`` takes the statistics of its tiles, ``logprob`` those of a
filtered row.  Block sizes follow from V and the dtype alone.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rlkernel.calls.sampling import FILTER_ORDERS, SampleStats, Sampling
from rlkernel.triton_ops import sampling_kernels
from rlkernel.triton_ops._device import DTYPES, device_reasons
from rlkernel.triton_ops.logprob_kernels import MAX_VOCAB
from rlkernel.triton_ops.sampling_finish_kernels import finish_kernel
from rlkernel.triton_ops.sampling_kernels import Field, statistics_kernel

SPLIT, GROUP, RECORD = sampling_kernels.SPLIT.value, sampling_kernels.GROUP.value, len(Field)
ROOM = 2048  # tokens that fit the registers of a program of pass B


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits = tensors[0]
    reasons = device_reasons(logits)
    if logits.dtype not in DTYPES:
        reasons.append(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        reasons.append(f"logits must be dense in the last dimension, got strides {logits.stride()}")
    if logits.shape[-1] > MAX_VOCAB:
        reasons.append(f"the vocabulary must be at most {MAX_VOCAB}, got {logits.shape[-1]}")
    return reasons


def forward(logits: Tensor, adjusted: Tensor | None, sampling: Sampling) -> SampleStats:
    rows, vocab = logits.shape
    partials, group_max = buffers(rows, vocab, sampling, logits.device)
    tile_statistics(logits, adjusted, 0, vocab, sampling, partials, group_max)
    return finish(logits, adjusted, vocab, sampling, partials, group_max)


def buffers(rows: int, vocab: int, sampling: Sampling, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """For the statistics of all splits of a row, and the maxima of its groups where a token of it is
    looked for among them."""
    splits, groups = triton.cdiv(vocab, SPLIT), triton.cdiv(vocab, GROUP)
    partials = torch.empty(rows, splits, RECORD, dtype=torch.float64, device=device)
    if sampling.rank or sampling.may_filter(vocab):
        return partials, torch.empty(rows, groups, dtype=torch.float32, device=device)
    return partials, None


def tile_statistics(
    tile: Tensor,
    adjusted: Tensor | None,
    vocab_start: int,
    vocab: int,
    sampling: Sampling,
    partials: Tensor,
    group_max: Tensor | None,
) -> None:
    """Leave in ``partials`` and ``group_max``, which are those of all ``vocab`` tokens, what the ``tile``
    [B, Vt] of the tokens from ``vocab_start`` on says.  ``vocab_start`` is a multiple of the split."""
    rows, width = tile.shape
    if tile.numel() == 0:
        return
    # 16 bytes a thread and load; the bits do not depend on it
    vec = 16 // (tile.element_size() if adjusted is None else 4)
    splits = triton.cdiv(width, SPLIT)
    with torch.cuda.device_of(tile):
        statistics_kernel[(rows * splits,)](
            tile, tile.stride(0), *_rows_of(adjusted), *_rows_of(sampling.token_bitmask),
            width, vocab_start, splits, triton.cdiv(vocab, SPLIT), triton.cdiv(vocab, GROUP),
            *_per_row(sampling.temperature), sampling.seeds, sampling.positions, sampling.token_ids,
            sampling.skip, partials, group_max,
            RAW=sampling.raw, ENTROPY=sampling.entropy or sampling.thresholds is not None,
            SIGMA=sampling.may_use_sigma, GUMBEL=sampling.gumbel, SCATTERED=_scattered(tile, adjusted),
            LANES=SPLIT // vec, VEC=vec, num_warps=8 if sampling.may_use_sigma or sampling.gumbel else 4,
            enable_fp_fusion=False,
        )  # fmt: skip


def finish(
    logits: Tensor | None,
    adjusted: Tensor | None,
    vocab: int,
    sampling: Sampling,
    partials: Tensor,
    group_max: Tensor | None,
) -> SampleStats:
    """The rows' results from the statistics of all their tiles.  ``logits`` [B, V] and ``group_max`` may be
    None where no row can be filtered and no rank is wanted."""
    rows, device = len(partials), partials.device

    def empty(dtype: torch.dtype = torch.float32, *more: int) -> Tensor:
        return torch.empty(rows, *more, dtype=dtype, device=device)

    stats = SampleStats(
        token_ids=empty(torch.int64),
        raw_logprobs=empty() if sampling.raw else None,
        tempered_logprobs=empty(),
        processed_logprobs=empty(),
        kept_mass=empty(),
        kept_count=empty(torch.int64),
        entropy=empty() if sampling.entropy else None,
        rank=empty(torch.int64) if sampling.rank else None,
        support=empty(torch.int32, sampling.support) if sampling.support else None,
        valid=empty(torch.bool),
        row_max=empty(),
        log_sum=empty(),
    )
    if rows == 0:
        return stats
    filters = sampling.may_filter(vocab)
    groups = triton.cdiv(vocab, GROUP)
    rereads = filters or sampling.rank
    listed = empty(torch.int32, groups) if rereads else None
    candidates = empty(torch.float32, ROOM) if filters else None
    top_k = sampling.top_k if isinstance(sampling.top_k, Tensor) else min(sampling.top_k, vocab)
    warps = 1
    if rereads:  # entries that are loaded one by one take more registers: fewer of them a thread
        warps = 16 if vocab > SPLIT and _scattered(logits, adjusted) else 8
    with torch.cuda.device_of(partials):
        finish_kernel[(rows,)](
            *_rows_of(logits if rereads else None), *_rows_of(adjusted if rereads else None),
            *_rows_of(sampling.token_bitmask), vocab, triton.cdiv(vocab, SPLIT), groups,
            *_per_row(sampling.temperature), *((top_k, 0) if isinstance(top_k, Tensor) else (None, top_k)),
            *_per_row(sampling.top_p), *_per_row(sampling.min_p), *_per_row(sampling.top_n_sigma),
            sampling.thresholds, sampling.band, sampling.seeds, sampling.positions, sampling.token_ids,
            sampling.skip, partials, group_max,
            *stats[:9], sampling.support, *stats[9:], listed, candidates,
            FILTER=filters, ORDER=FILTER_ORDERS.index(sampling.order), GUMBEL=sampling.gumbel,
            SPLITS=triton.next_power_of_2(triton.cdiv(vocab, SPLIT)),
            GROUPS=max(64, min(1024, triton.next_power_of_2(groups))), ROOM=ROOM,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return stats


def _scattered(*tensors: Tensor | None) -> bool:
    """Whether rows start at other than multiples of 16 elements."""
    present = [t for t in tensors if t is not None]
    return any(x % 16 for t in present for x in (t.shape[1], *t.stride()[:-1], t.data_ptr()))


def _rows_of(x: Tensor | None) -> tuple[Tensor | None, int]:
    return x, 0 if x is None else x.stride(0)


def _per_row(x: float | Tensor) -> tuple[Tensor | None, float]:
    """All numbers are fp32 in the kernels, one for all rows or one for each."""
    return (x, 1.0) if isinstance(x, Tensor) else (None, ctypes.c_float(x).value)


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""

    def run(
        vocab: int, dtype: torch.dtype, adjusted: bool = False, masked: bool = False, **options: Any
    ) -> None:
        rows = torch.ones(2, dtype=torch.int64)
        request: dict[str, Any] = {
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": float("inf"),
            "seeds": rows, "positions": rows, "token_ids": None, "token_bitmask": None, "skip": None,
            "order": "sequential", "gumbel": False, "raw": True, "entropy": False, "rank": False,
            "support": 0,
        } | options  # fmt: skip
        if masked:
            request["token_bitmask"] = torch.zeros(2, triton.cdiv(vocab, 32), dtype=torch.int32)
        z = torch.empty(2, vocab) if adjusted else None
        forward(torch.empty(2, vocab, dtype=dtype), z, Sampling(**request))

    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    rows = torch.ones(2)
    everything: dict[str, Any] = {
        "temperature": rows, "top_k": rows.to(torch.int64), "top_p": rows, "min_p": rows,
        "top_n_sigma": rows, "thresholds": torch.ones(2, 3), "skip": rows > 0, "entropy": True,
        "rank": True, "support": 512,
    }  # fmt: skip
    forced: dict[str, Any] = {"seeds": None, "positions": None, "token_ids": torch.ones(2, dtype=torch.int64)}
    return {
        "bf16": lambda: run(151936, bf16),
        "fp16 odd V": lambda: run(50257, fp16, temperature=rows, entropy=True),
        "fp32 gumbel": lambda: run(151936, fp32, gumbel=True),
        "bf16 forced rank": lambda: run(151936, bf16, **forced, rank=True, entropy=True),
        "bf16 top-k top-p": lambda: run(151936, bf16, top_k=50, top_p=0.9, support=512),
        "bf16 band": lambda: run(151936, bf16, top_p=0.9, support=512, band=torch.ones(2, 2)),
        "bf16 band odd V": lambda: run(50257, bf16, True, True, **everything, band=torch.ones(2, 2)),
        "fp32 band gumbel": lambda: run(151936, fp32, band=torch.ones(2, 2), gumbel=True),
        "bf16 everything": lambda: run(151936, bf16, True, True, **everything),
        "bf16 everything odd V": lambda: run(50257, bf16, True, True, **everything),
        "fp32 everything gumbel joint": lambda: run(
            151936, fp32, masked=True, **everything, gumbel=True, order="joint"
        ),
    }
