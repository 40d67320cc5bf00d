"""``sampling`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device.

Also its two kernels one by one: ``sample_linear`` takes the statistics of its tiles, ``logprob`` those of a
filtered row."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, launch
from rlkernel.types import FILTER_ORDERS, SampleStats, Sampling

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # rlkernel::Dtype
SPLIT, GROUP, RECORD = 4096, 64, 13  # rlkernel::kSamplingSplit, kSamplingGroup, kRecord


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits, reasons = tensors[0], []
    if logits.dtype not in DTYPES:
        dtype = str(logits.dtype).removeprefix("torch.")
        reasons.append(f"logits must be fp16, bf16 or fp32, got {dtype}")
    if logits.dim() and logits.shape[-1] > 1 and logits.stride(-1) != 1:
        reasons.append(f"the last stride of logits must be 1, got {logits.stride(-1)}")
    kernels = kernels_for(logits.device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


def forward(logits: Tensor, adjusted: Tensor | None, sampling: Sampling) -> SampleStats:
    rows, vocab = logits.shape
    device = logits.device
    partials = torch.empty(rows, -(-vocab // SPLIT), RECORD, dtype=torch.float64, device=device)
    group_max = None
    if sampling.rank or sampling.may_filter(vocab):
        group_max = torch.empty(rows, -(-vocab // GROUP), dtype=torch.float32, device=device)
    arguments = _inputs(logits, vocab, adjusted, 0, vocab, sampling, partials, group_max)
    if rows:
        launch("sampling_statistics", device, *arguments)
    return _finish(sampling, rows, device, arguments)


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
    if tile.numel():
        arguments = _inputs(tile, tile.shape[1], adjusted, vocab_start, vocab, sampling, partials, group_max)
        launch("sampling_statistics", tile.device, *arguments)


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
    arguments = _inputs(logits, vocab, adjusted, 0, vocab, sampling, partials, group_max)
    return _finish(sampling, partials.shape[0], partials.device, arguments)


def _finish(sampling: Sampling, rows: int, device: torch.device, arguments: tuple[Any, ...]) -> SampleStats:
    like = torch.empty_like  # half the time of torch.empty
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    number = torch.empty(rows, dtype=torch.float32, device=device)
    stats = SampleStats(
        token_ids=ids,
        raw_logprobs=like(number) if sampling.raw else None,
        tempered_logprobs=number,
        processed_logprobs=like(number),
        kept_mass=like(number),
        kept_count=like(ids),
        entropy=like(number) if sampling.entropy else None,
        rank=like(ids) if sampling.rank else None,
        support=_support(rows, sampling.support, device),
        valid=torch.empty(rows, dtype=torch.bool, device=device),
        row_max=like(number),
        log_sum=like(number),
    )
    if rows == 0:
        return stats
    *results, valid, row_max, log_sum = map(_address, stats)
    outputs = (*results, sampling.support, valid, row_max, log_sum, 0, 0)
    launch("sampling_finish", device, *arguments, *outputs)
    return stats


def _support(rows: int, size: int, device: torch.device) -> Tensor | None:
    return torch.empty(rows, size, dtype=torch.int32, device=device) if size else None


def _inputs(
    logits: Tensor | None,
    tile_vocab: int,
    adjusted: Tensor | None,
    vocab_start: int,
    vocab: int,
    sampling: Sampling,
    partials: Tensor,
    group_max: Tensor | None,
) -> tuple[Any, ...]:
    """The fields of SamplingInputs, in order."""
    bitmask, top_k = sampling.token_bitmask, sampling.top_k
    if not isinstance(top_k, Tensor):
        top_k = min(top_k, vocab)  # a number of any size is one
    per_row: list[float] = []
    for x in (sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.top_n_sigma):
        per_row += (x.data_ptr(), 0) if isinstance(x, Tensor) else (0, x)
    return (
        _address(logits), 0 if logits is None else DTYPES[logits.dtype], partials.shape[0], _stride(logits),
        tile_vocab, vocab_start, vocab, _address(adjusted), _stride(adjusted), _address(bitmask),
        _stride(bitmask), *per_row, _address(sampling.thresholds), _address(sampling.band),
        _address(sampling.seeds), _address(sampling.positions), _address(sampling.token_ids),
        _address(sampling.skip),
        FILTER_ORDERS.index(sampling.order), sampling.gumbel, sampling.raw,
        sampling.entropy or sampling.thresholds is not None,
        sampling.may_use_sigma, partials.data_ptr(),
        _address(group_max),
    )  # fmt: skip


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
