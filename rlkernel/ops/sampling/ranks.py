"""What ``sample`` says of other tokens than its own: the likeliest ones, given ones, and the token's place.

All of it is looked up in the logits behind the kernels: nothing here is summed over the vocabulary again but
``raw`` where z is not the logits, which one more call of the op sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling, SamplingCall
from rlkernel.ops.sampling.drawing import draw


class Wanted(NamedTuple):
    """What a caller asks of ``ranked``."""

    ranking: str  # one of RANKINGS
    top: int
    token_ids: Tensor | None  # [B, K]; -1 is padding

    def of_rows(self, a: int, b: int) -> "Wanted":
        return self._replace(token_ids=None if self.token_ids is None else self.token_ids[a:b])


def ranked(call: SamplingCall, stats: SampleStats, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The rank [B], the likeliest ids [B, top], their logprobs, and those of the given ids [B, K]."""
    ranking, wanted_top, given = wanted
    raw = ranking == "raw"
    changed = call.adjusted is not None or call.request.token_bitmask is not None
    again = raw and changed and call.request.rank
    if not wanted_top and given is None and not again:
        return stats.rank, None, None, None
    if raw:
        call = call._replace(adjusted=None, request=call.request._replace(token_bitmask=None))
    logits, adjusted, request, _ = call
    vocab = logits.shape[1]
    top = min(wanted_top, vocab)
    plain = Sampling(
        top_k=top, token_ids=stats.token_ids, token_bitmask=request.token_bitmask, rank=again,
        rank_ties=request.rank_ties, support=top, softmax=raw,
    )  # fmt: skip
    rank, row_max, log_sum, t = stats.rank, stats.row_max, stats.log_sum, _per_row(request.temperature)
    table = None
    if raw or 0 < top < vocab:
        found = draw(SamplingCall(logits, adjusted, plain, ("support", "token_ids")))
        table = found.support
        if raw:
            row_max, log_sum, t = found.row_max, found.log_sum, 1.0
            rank = found.rank if again else rank
    assert row_max is not None and log_sum is not None
    z = logits.to(row_max.dtype) if adjusted is None else adjusted
    # on a GPU torch multiplies by the reciprocal of a number, and divides by a tensor
    divisor = t if isinstance(t, Tensor) or t == 1.0 else row_max.new_full((), t)
    values = _Values(z, request.token_bitmask, row_max, log_sum, divisor)

    def logprobs(ids: Tensor, at: Tensor, before: Callable[[], Tensor]) -> Tensor:
        if ranking != "processed":
            return values.logprobs(at)
        if request.band is not None:
            return _scored(call, ids)
        return _processed(values.logprobs(at), before(), request, stats)

    top_ids = top_logprobs = id_logprobs = None
    valid = stats.valid[:, None]
    if wanted_top:
        every = torch.arange(top, device=z.device).expand(z.shape[0], top)
        ids = every if table is None or top == vocab else table.long()
        at, place = values.at(ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, place)
        top_ids = torch.where(valid, ids, -1)
        top_logprobs = torch.where(valid, logprobs(ids, at, lambda: every), torch.nan)
    if given is not None:
        at = values.at(given)
        inside = (given >= 0) & (given < vocab)
        id_logprobs = logprobs(given, at, lambda: values.before(given, at))
        id_logprobs = torch.where(valid, torch.where(inside, id_logprobs, -torch.inf), torch.nan)
    return rank, top_ids, top_logprobs, id_logprobs


class _Values(NamedTuple):
    z: Tensor
    bitmask: Tensor | None
    row_max: Tensor
    log_sum: Tensor
    t: float | Tensor

    def at(self, ids: Tensor) -> Tensor:
        """z of the ids [B, K], -inf where they are masked, or none."""
        index = ids.clamp(0, self.z.shape[1] - 1)
        values = self.z.gather(-1, index)
        if self.bitmask is not None:
            word = self.bitmask.gather(-1, index // 32)
            values = values.masked_fill((word >> (index % 32).to(torch.int32)) & 1 == 0, -torch.inf)
        return values.masked_fill(index != ids, -torch.inf)  # outside [0, V)

    def logprobs(self, values: Tensor) -> Tensor:
        return (values - self.row_max[:, None]) / self.t - self.log_sum[:, None]

    def before(self, ids: Tensor, values: Tensor) -> Tensor:
        """How many tokens stand before each of the ids [B, K]; one reading of the row for each."""
        z, every = self.z, torch.arange(self.z.shape[1], device=self.z.device)
        if self.bitmask is not None:
            allowed = self.bitmask[:, every // 32] >> (every % 32).to(torch.int32) & 1
            z = z.masked_fill(allowed == 0, -torch.inf)
        counts = [
            ((z > value[:, None]) | ((z == value[:, None]) & (every < own[:, None]))).sum(-1)
            for own, value in zip(ids.unbind(-1), values.unbind(-1), strict=True)
        ]
        return torch.stack(counts, -1) if counts else ids


def _processed(tempered: Tensor, before: Tensor, request: Sampling, stats: SampleStats) -> Tensor:
    """Of tokens with ``before`` others in front of them: the kept ones are the first ``kept_count``."""
    made, kept = tempered - stats.kept_mass.log()[:, None], stats.kept_count[:, None]
    if isinstance(request.temperature, Tensor) or request.temperature == 0:
        greedy = torch.as_tensor(request.temperature == 0, device=made.device).reshape(-1, 1)
        made = torch.where(greedy, tempered if request.greedy_softmax else 0.0, made)
        kept = torch.where(greedy, torch.iinfo(kept.dtype).max, kept) if request.greedy_softmax else kept
    return torch.where(before < kept, made, -torch.inf)


def _scored(call: SamplingCall, ids: Tensor) -> Tensor:
    """Processed log-probabilities of the ids [B, K] where the kept tokens are not the first ones: K calls."""
    plain = call._replace(request=call.request._replace(raw=False, entropy=False, rank=False, support=0))
    columns = [
        draw(plain.scoring(own)).processed_logprobs
        for own in ids.clamp(0, call.logits.shape[1] - 1).t().contiguous()  # kernels take dense ids
    ]
    return torch.stack(columns, -1) if columns else ids.to(torch.float32)


def _per_row(temperature: float | Tensor) -> float | Tensor:
    """1 for greedy rows."""
    if isinstance(temperature, Tensor):
        return torch.where(temperature == 0, 1, temperature)[:, None]
    return temperature or 1.0
