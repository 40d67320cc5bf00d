"""``sampling`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device.

Also its two kernels one by one: ``sample_linear`` takes the statistics of its tiles, ``logprob`` those of a
filtered row."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling
from rlkernel.native import DTYPES, kernels, kernels_for


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits, reasons = tensors[0], []
    if logits.dtype not in DTYPES:
        dtype = str(logits.dtype).removeprefix("torch.")
        reasons.append(f"logits must be fp16, bf16 or fp32, got {dtype}")
    if logits.dim() and logits.shape[-1] > 1 and logits.stride(-1) != 1:
        reasons.append(f"the last stride of logits must be 1, got {logits.stride(-1)}")
    found = kernels_for(logits.device)
    return [*reasons, found] if isinstance(found, str) else reasons


def forward(logits: Tensor, adjusted: Tensor | None, sampling: Sampling) -> SampleStats:
    rows, vocab = logits.shape
    partials, group_max = buffers(rows, vocab, sampling, logits.device)
    tile_statistics(logits, adjusted, 0, vocab, sampling, partials, group_max)
    return finish(logits, adjusted, vocab, sampling, partials, group_max)


def buffers(rows: int, vocab: int, sampling: Sampling, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """For the statistics of all splits of a row, and the maxima of its groups where a token of it is
    looked for among them."""
    part = kernels(device)
    splits, groups = -(-vocab // part.SAMPLING_SPLIT), -(-vocab // part.SAMPLING_GROUP)
    partials = torch.empty(rows, splits, part.SAMPLING_RECORD, dtype=torch.float64, device=device)
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
    if tile.numel() == 0:
        return
    top_k = sampling.top_k
    kernels(tile.device).sampling_statistics(
        logits=tile, vocab_start=vocab_start, vocab=vocab, adjusted=adjusted,
        token_bitmask=sampling.token_bitmask, temperature=sampling.temperature,
        top_k=top_k if isinstance(top_k, Tensor) else min(top_k, vocab), top_p=sampling.top_p,
        min_p=sampling.min_p, top_n_sigma=sampling.top_n_sigma, thresholds=sampling.thresholds,
        band=sampling.band, seeds=sampling.seeds, positions=sampling.positions, token_ids=sampling.token_ids,
        skip=sampling.skip, order=sampling.order, gumbel=sampling.gumbel, raw=sampling.raw,
        entropy=sampling.entropy or sampling.thresholds is not None, sigma=sampling.may_use_sigma,
        partials=partials, group_max=group_max,
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
    rows, device = partials.shape[0], partials.device
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
    top_k = sampling.top_k  # a number of any size is one
    kernels(device).sampling_finish(
        logits=logits, vocab_start=0, vocab=vocab, adjusted=adjusted, token_bitmask=sampling.token_bitmask,
        temperature=sampling.temperature,
        top_k=top_k if isinstance(top_k, Tensor) else min(top_k, vocab), top_p=sampling.top_p,
        min_p=sampling.min_p, top_n_sigma=sampling.top_n_sigma, thresholds=sampling.thresholds,
        band=sampling.band, seeds=sampling.seeds, positions=sampling.positions, token_ids=sampling.token_ids,
        skip=sampling.skip, order=sampling.order, gumbel=sampling.gumbel, raw=sampling.raw,
        entropy=sampling.entropy or sampling.thresholds is not None, sigma=sampling.may_use_sigma,
        partials=partials, group_max=group_max,
        out_ids=stats.token_ids, raw_logprobs=stats.raw_logprobs, tempered_logprobs=stats.tempered_logprobs,
        processed_logprobs=stats.processed_logprobs, kept_mass=stats.kept_mass, kept_count=stats.kept_count,
        entropies=stats.entropy, rank=stats.rank, support=stats.support, valid=stats.valid,
        row_max=stats.row_max, log_sum=stats.log_sum,
    )  # fmt: skip
    return stats


def _support(rows: int, size: int, device: torch.device) -> Tensor | None:
    return torch.empty(rows, size, dtype=torch.int32, device=device) if size else None
