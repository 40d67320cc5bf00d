"""Inside ``rlkernel.batch_invariant`` a rollout's log-probabilities are the trainer's: those of ``logprob``.

The sampler's own differ from them in the last place, because it sums a row in another order.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, SamplingCall
from rlkernel.ops.logprob import logprob
from rlkernel.ops.sampling.ranks import Wanted
from rlkernel.runtime import invariance

Score = Callable[[Tensor, float | Tensor], Tensor]  # of tokens [B], at a temperature


def as_trained(
    call: SamplingCall,
    stats: SampleStats,
    raw: Score | None = None,
    seen: Collection[str] = ("raw", "tempered", "processed"),
) -> SampleStats:
    """The tokens' log-probabilities of the kinds ``seen``, of logits that ``raw`` scores where they are not
    stored.

    A restricted distribution keeps the sampler's, which are those of ``logprob`` over its support; so does
    one under a bitmask, of which ``logprob`` knows nothing.
    """
    if not invariance.is_on() or not len(stats.token_ids):
        return stats
    request, ids = call.request, stats.token_ids.clamp(min=0)
    raw = raw or _of(call.logits)

    def valid(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(stats.valid, new, old)

    with torch.no_grad():
        if stats.raw_logprobs is not None:
            stats = stats._replace(raw_logprobs=valid(raw(ids, 1.0), stats.raw_logprobs))
        if request.token_bitmask is not None or not {"tempered", "processed"} & set(seen):
            return stats
        t = request.temperature
        t = torch.where(t == 0, 1, t) if isinstance(t, Tensor) else t or 1.0
        score = raw if call.adjusted is None else _of(call.adjusted)
        tempered = valid(score(ids, t), stats.tempered_logprobs)
        whole = stats.kept_count == call.logits.shape[1]
        if request.greedy_softmax:  # of the whole row, of which the likeliest alone is kept
            whole = whole | (torch.as_tensor(request.temperature, device=ids.device) == 0)
        processed = torch.where(whole, tempered, stats.processed_logprobs)
    return stats._replace(tempered_logprobs=tempered, processed_logprobs=processed)


def _of(logits: Tensor) -> Score:
    return lambda ids, t: logprob(logits, ids, temperature=t).logprobs


def named_again(
    found: Sequence[Tensor | None], stats: SampleStats, wanted: Wanted
) -> tuple[Tensor | None, ...]:
    """``ranked``'s results, in which the token may stand once more: with the same number."""
    rank, top_ids, top, given = found
    own = getattr(stats, f"{wanted.ranking}_logprobs")
    if not invariance.is_on() or own is None:
        return tuple(found)
    token, own = stats.token_ids[:, None], own[:, None]
    if top is not None and top_ids is not None:
        top = torch.where(top_ids == token, own, top)
    if given is not None and wanted.token_ids is not None:
        given = torch.where(wanted.token_ids == token, own, given)
    return rank, top_ids, top, given
