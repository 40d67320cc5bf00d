"""What the caller of ``sample`` and its kin sees of the statistics."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleOutput, SampleStats, Sampling, SamplingCall
from rlkernel.ops.sampling.numbers import described
from rlkernel.ops.sampling.ranks import Wanted, ranked
from rlkernel.ops.sampling.trained import Score, as_trained, named_again


def output(
    shape: torch.Size, call: SamplingCall, stats: SampleStats, wanted: Wanted, options: dict[str, Any],
    raw: Score | None = None,
) -> SampleOutput:  # fmt: skip
    """Values of the logits are looked up only where ``ranked`` must; ``raw`` as in ``as_trained``."""
    stats = as_trained(call, stats, raw, seen={*options["return_logprobs"], wanted.ranking})
    found = named_again(ranked(call, stats, wanted), stats, wanted)
    return assembled(shape, call.logits.shape[1], call.request, stats, found, options)


def assembled(
    shape: torch.Size, vocab: int, request: Sampling, stats: SampleStats, found: Sequence[Tensor | None],
    options: dict[str, Any],
) -> SampleOutput:  # fmt: skip
    """Of what ``ranked`` found."""
    logprobs, out = options["return_logprobs"], options["out"]
    rank, top_ids, top_logprobs, id_logprobs = found
    ids = offsets = overflow = None
    if stats.support is not None:
        ids, offsets, overflow = _compact(stats, request, vocab)

    def rows(x: Tensor | None) -> Any:
        return x if x is None or len(shape) == 1 else x.reshape((*shape, *x.shape[1:]))

    made = SampleOutput(
        token_ids=rows(stats.token_ids),
        raw_logprobs=rows(stats.raw_logprobs),
        tempered_logprobs=rows(stats.tempered_logprobs) if "tempered" in logprobs else None,
        processed_logprobs=rows(stats.processed_logprobs) if "processed" in logprobs else None,
        kept_mass=rows(stats.kept_mass),
        kept_count=rows(stats.kept_count),
        entropy=rows(stats.entropy),
        rank=rows(rank),
        top_ids=rows(top_ids),
        top_logprobs=rows(top_logprobs),
        id_logprobs=rows(id_logprobs),
        support_ids=ids,
        support_offsets=offsets,
        support_overflow=rows(overflow),
        valid=rows(stats.valid),
    )
    return made if out is None else _written(out, made)


def _written(out: SampleOutput, made: SampleOutput) -> SampleOutput:
    """``out`` with the results in its tensors; nothing is written when one does not fit."""
    pairs: list[Any] = [x for x in zip(made._fields, made, out, strict=True) if x[1] is not None]
    for name, mine, theirs in pairs:
        if (want := described(mine)) != (got := described(theirs)):
            raise ValueError(f"out.{name} must be {want}, got {got}")
    for _, mine, theirs in pairs:
        theirs.copy_(mine)
    return out


def _compact(stats: SampleStats, request: Sampling, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """``support_ids`` [B * K] with the rows' kept ids one after another and -1 behind the last,
    ``support_offsets`` [B + 1] and ``support_overflow`` [B]."""
    table = stats.support
    assert table is not None
    rows, room = table.shape
    counts = (table >= 0).sum(-1)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = offsets[:-1, None] + torch.arange(room, device=table.device)
    ids = torch.full((rows * room + 1,), -1, dtype=torch.int32, device=table.device)
    # what is padding goes to a last element that is cut off
    ids.scatter_(0, torch.where(table >= 0, place, rows * room).flatten(), table.flatten())
    return ids[:-1], offsets, _is_filtered(stats, request, vocab) & (stats.kept_count > room)


def _is_filtered(stats: SampleStats, request: Sampling, vocab: int) -> Tensor:
    """Rows whose distribution is not the whole one: a filter is on and does not keep the vocabulary."""
    in_range = (request.top_k >= 1) & (request.top_k < vocab)
    on = in_range | (request.top_p < 1) | (request.min_p > 0) | (request.top_n_sigma < torch.inf)
    on = on | (request.token_bitmask is not None)
    if request.thresholds is not None:
        on = on | (request.thresholds > 0).any(-1)
    if request.band is not None:
        on = on | (request.band < 1).any(-1)
    return stats.valid & (request.temperature != 0) & on & (stats.kept_count < vocab)
