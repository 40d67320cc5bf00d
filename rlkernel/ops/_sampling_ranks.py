"""What ``sample`` says of other tokens than its own: the likeliest ones, given ones, and the token's place.

All of it is looked up in the logits behind the kernels: nothing here is summed over the vocabulary again but
``raw`` where z is not the logits, which one more call of the op sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling

RANKINGS = ("tempered", "raw", "processed")
Run = Callable[[Tensor, Tensor | None, Sampling, frozenset[str]], SampleStats]


class Wanted(NamedTuple):
    """What a caller asks of ``ranked``."""

    ranking: str  # one of RANKINGS
    top: int
    token_ids: Tensor | None  # [B, K]; -1 is padding

    @property
    def anything(self) -> bool:
        return self.top > 0 or self.token_ids is not None


class Ranked(NamedTuple):
    rank: Tensor | None  # [B]
    top_ids: Tensor | None  # [B, top]
    top_logprobs: Tensor | None
    id_logprobs: Tensor | None  # [B, K]


def ranked(
    run: Run, logits: Tensor, adjusted: Tensor | None, request: Sampling, stats: SampleStats, wanted: Wanted
) -> Ranked:
    raw = wanted.ranking == "raw"
    changed = adjusted is not None or request.token_bitmask is not None
    rank = stats.rank
    if not wanted.anything and not (raw and changed and request.rank):
        return Ranked(rank, None, None, None)
    top = min(wanted.top, logits.shape[1])
    plain = request._replace(
        temperature=1.0, top_k=top, top_p=1.0, min_p=0.0, top_n_sigma=float("inf"), seeds=None,
        positions=None, token_ids=stats.token_ids, raw=False, entropy=False, rank=False, support=top,
        thresholds=None, band=None,
    )  # fmt: skip
    needs = frozenset({"token_ids", "support"})
    row_max, log_sum, t = stats.row_max, stats.log_sum, _per_row(request.temperature)
    if raw:
        adjusted, request = None, request._replace(token_bitmask=None)
        plain = plain._replace(token_bitmask=None, rank=stats.rank is not None and changed)
    table = None
    if raw or 0 < top < logits.shape[1]:
        found = run(logits, adjusted, plain, needs)
        table = found.support
        if raw:
            row_max, log_sum, t = found.row_max, found.log_sum, 1.0
            rank = found.rank if plain.rank else rank
    z = logits.to(row_max.dtype) if adjusted is None else adjusted
    values = _Values(z, request.token_bitmask, row_max, log_sum, t)

    top_ids = top_logprobs = None
    if wanted.top:
        if table is None or top == logits.shape[1]:
            ids = torch.arange(top, device=z.device).expand(z.shape[0], top)
        else:
            ids = table.long()
        at, place = values.at(ids).sort(dim=-1, descending=True, stable=True)
        top_logprobs, ids = values.logprobs(at), ids.gather(-1, place)
        if wanted.ranking == "processed" and request.band is not None:
            top_logprobs = _scored(run, logits, adjusted, request, ids)
        elif wanted.ranking == "processed":
            before = torch.arange(top, device=z.device).expand_as(ids)
            top_logprobs = _processed(top_logprobs, before, request, stats)
        top_ids = torch.where(stats.valid[:, None], ids, -1)
        top_logprobs = torch.where(stats.valid[:, None], top_logprobs, torch.nan)
    id_logprobs = None
    if wanted.token_ids is not None:
        given = wanted.token_ids
        at = values.at(given)
        id_logprobs = values.logprobs(at)
        if wanted.ranking == "processed" and request.band is not None:
            id_logprobs = _scored(run, logits, adjusted, request, given)
        elif wanted.ranking == "processed":
            id_logprobs = _processed(id_logprobs, values.before(given, at), request, stats)
        inside = (given >= 0) & (given < z.shape[1])
        id_logprobs = torch.where(inside, id_logprobs, -torch.inf)
        id_logprobs = torch.where(stats.valid[:, None], id_logprobs, torch.nan)
    return Ranked(rank, top_ids, top_logprobs, id_logprobs)


class _Values(NamedTuple):
    z: Tensor
    bitmask: Tensor | None
    row_max: Tensor
    log_sum: Tensor
    t: float | Tensor

    def at(self, ids: Tensor) -> Tensor:
        """z of the ids [B, K], -inf where they are masked, or none."""
        vocab = self.z.shape[1]
        index = ids.clamp(0, vocab - 1)
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
    made = tempered - stats.kept_mass.log()[:, None]
    if isinstance(request.temperature, Tensor) or request.temperature == 0:
        greedy = torch.as_tensor(request.temperature == 0, device=made.device).reshape(-1, 1)
        made = torch.where(greedy, 0.0, made)
    return torch.where(before < stats.kept_count[:, None], made, -torch.inf)


def _scored(run: Run, logits: Tensor, adjusted: Tensor | None, request: Sampling, ids: Tensor) -> Tensor:
    """Processed log-probabilities of the ids [B, K] where the kept tokens are not the first ones: K calls."""
    plain = request._replace(seeds=None, positions=None, raw=False, entropy=False, rank=False, support=0)
    columns = [
        run(logits, adjusted, plain._replace(token_ids=own), frozenset({"token_ids"})).processed_logprobs
        for own in ids.clamp(0, logits.shape[1] - 1).t().contiguous()  # kernels take dense ids
    ]
    return torch.stack(columns, -1) if columns else ids.to(torch.float32)


def _per_row(temperature: float | Tensor) -> float | Tensor:
    """1 for greedy rows."""
    if isinstance(temperature, Tensor):
        return torch.where(temperature == 0, 1, temperature)[:, None]
    return temperature or 1.0
