"""``sampling`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device.

Also its two kernels one by one: ``sample_linear`` takes the statistics of its tiles, ``logprob`` those of a
filtered row."""

from typing import Any

from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling, SamplingCall, Scratch
from rlkernel.native import kernels, taking_logits

unsupported = taking_logits


def forward(call: SamplingCall) -> SampleStats:
    logits, adjusted, request, _ = call
    scratch = Scratch.of(logits.shape[0], logits.shape[1], request, logits.device)
    fields, part = _fields(logits, adjusted, 0, request, scratch), kernels(logits.device)
    if logits.numel():
        part.sampling_statistics(**fields)
    return _finished(request, scratch, fields, part)


def tile_statistics(
    tile: Tensor, adjusted: Tensor | None, vocab_start: int, request: Sampling, scratch: Scratch
) -> None:
    """Leave in ``scratch`` what the ``tile`` [B, Vt] of the tokens from ``vocab_start`` on says, which is a
    multiple of ``SPLIT``."""
    if tile.numel():
        fields = _fields(tile, adjusted, vocab_start, request, scratch)
        kernels(tile.device).sampling_statistics(**fields)


def finish(
    logits: Tensor | None, adjusted: Tensor | None, request: Sampling, scratch: Scratch
) -> SampleStats:
    """The rows' results from the statistics of all their tiles.  ``logits`` [B, V] may be None where no row
    can be filtered and no rank is wanted."""
    fields = _fields(logits, adjusted, 0, request, scratch)
    return _finished(request, scratch, fields, kernels(scratch.records.device))


def _finished(request: Sampling, scratch: Scratch, fields: dict[str, Any], part: Any) -> SampleStats:
    rows = scratch.records.shape[0]
    stats = SampleStats.empty(rows, request, scratch.records.device)
    if rows:
        part.sampling_finish(
            **fields, out_ids=stats.token_ids, raw_logprobs=stats.raw_logprobs,
            tempered_logprobs=stats.tempered_logprobs, processed_logprobs=stats.processed_logprobs,
            kept_mass=stats.kept_mass, kept_count=stats.kept_count, entropies=stats.entropy, rank=stats.rank,
            support=stats.support, valid=stats.valid, row_max=stats.row_max, log_sum=stats.log_sum,
        )  # fmt: skip
    return stats


def _fields(
    logits: Tensor | None, adjusted: Tensor | None, vocab_start: int, request: Sampling, scratch: Scratch
) -> dict[str, Any]:
    """What both kernels take."""
    top_k = request.top_k  # a number of any size is one
    return {
        "logits": logits, "adjusted": adjusted, "vocab_start": vocab_start, "vocab": scratch.vocab,
        "token_bitmask": request.token_bitmask, "temperature": request.temperature,
        "top_k": top_k if isinstance(top_k, Tensor) else min(top_k, scratch.vocab), "top_p": request.top_p,
        "min_p": request.min_p, "top_n_sigma": request.top_n_sigma, "thresholds": request.thresholds,
        "band": request.band, "seeds": request.seeds, "positions": request.positions,
        "token_ids": request.token_ids, "skip": request.skip, "order": request.order,
        "rank_ties": request.rank_ties, "gumbel": request.gumbel,
        "greedy_softmax": request.greedy_softmax, "raw": request.raw,
        "entropy": request.entropy or request.thresholds is not None, "sigma": request.may_use_sigma,
        "partials": scratch.records, "group_max": scratch.group_max,
    }  # fmt: skip
