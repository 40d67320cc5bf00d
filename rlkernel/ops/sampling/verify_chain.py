"""Speculative decoding: which drafted tokens the target model keeps, by the random stream of ``sample``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel.calls import sampling as calls
from rlkernel.calls.sampling import Domain, SampleStats, SamplingCall, VerifyOutput
from rlkernel.ops import _validate
from rlkernel.ops.sampling import inputs, numbers, options_of_sample, takes_options_of_sample
from rlkernel.ops.sampling.drawing import draw
from rlkernel.ops.sampling.options import ChainOptions
from rlkernel.ops.sampling.penalties import Penalties
from rlkernel.ops.sampling.token_bias import TokenBias
from rlkernel.ops.sampling.trained import as_trained
from rlkernel.reference import sampling_stream as stream
from rlkernel.runtime import debug, invariance

_PER_REQUEST = ("temperature", "top_k", *inputs.RANGES, "xtc_threshold", "seeds")


@takes_options_of_sample(ChainOptions)
def verify_chain(
    draft_token_ids: Tensor,
    target_logits: Tensor,
    *,
    draft_logprobs: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    **options: Unpack[ChainOptions],
) -> VerifyOutput:
    """Keep the drafted tokens that the target would have drawn, and draw the one behind them.

    Without ``draft_logprobs`` the target's token at place j is the one that
    ``sample(target_logits[:, j], seeds=seeds, positions=positions + j)`` draws, and a draft is accepted while
    it is that token: a rollout with speculation has the very tokens of one without, whatever drafted them.

    With ``draft_logprobs``, the log-probabilities q of the distribution that each draft was drawn from, a
    draft d is accepted when ``u < p(d) / q(d)``, p being the target's distribution after temperature and
    filters; in the place of the first that is not, a token is drawn from ``max(p - q, 0)``, normalised;
    behind the last, one from p.  Every token is then distributed as p.  Acceptance and both draws have random
    numbers of their own: a drafter may ``sample`` with the same seeds.

    A drafter that drops drafts for their own value changes the distribution of those that stay.  Then q is
    that of these, masked and normalised again, and ``draft_lengths`` says where they end; or, where the
    target cannot draw what is dropped (p = 0, a grammar's ``token_bitmask``), the drafts stay or become -1,
    and q stays as it is.

    In both cases one row's result does not depend on the others (batch-invariant), nothing synchronises, and
    a row with T = 0 keeps the drafts that are the likeliest tokens.

    Args:
        draft_token_ids: [B, K] integers; one outside [0, V), such as -1, ends a row's drafts.  With
            ``draft_logprobs`` it is a draft that is rejected.
        target_logits: [B, K + 1, V]; row j is the target's distribution after the first j drafts.
        draft_logprobs: [B, K, V], normalised; -inf where a token could not be drafted, everywhere where
            nothing was and the draft is -1.
        draft_lengths: [B] integers in [0, K], how many drafts a row has; None means K.
        seeds, positions, temperature and the filters: as in ``sample``, a number or one
            per request [B]; ``positions`` is that of the first token.
        token_bitmask: int32 [B, K + 1, ceil(V / 32)].
        logit_bias: [V], [B, V], [B, K + 1, V], {token: bias}, one such dict for each request, or a
            ``TokenBias``.
        penalties: of the requests; the drafts before a place count as output.

    Returns:
        VerifyOutput.  A place whose logits hold NaN or no finite value ends its row, with token -1.

    Raises:
        ValueError: an argument is off, as in ``sample``; ``draft_logprobs`` are not normalised (looked at as
            values of tensors there).

    Acceptance by Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318).

    Examples:
        >>> logits = 9 * torch.eye(4)[None, [2, 0, 3]]
        >>> out = rlkernel.verify_chain(torch.tensor([[2, 1]]), logits, temperature=0.0)
        >>> out.accepted, out.token_ids
        (tensor([1]), tensor([[ 2,  0, -1]]))
    """
    chosen = options_of_sample("verify_chain", options)
    drafts, lengths = _checked(draft_token_ids, target_logits, draft_logprobs, draft_lengths)
    inside = (drafts >= 0) & (drafts < target_logits.shape[2])
    drafts = torch.where(inside, drafts, 0)
    if draft_logprobs is None:
        lengths = _leading(inside, lengths)
    else:
        _distributions(draft_logprobs, inside, lengths)
    rows, flat = inputs.rows_of(target_logits)
    (count, places), vocab = rows.shape, rows.vocab
    requests = rows._replace(shape=rows.shape[:1])
    start = numbers.int64("positions", 0 if chosen["positions"] is None else chosen["positions"])
    place = torch.arange(places, device=flat.device)
    if chosen["seeds"] is None:  # one for a request, not for a place
        chosen["seeds"] = inputs.seeds_of(None, requests)
    spread = {name: _spread(name, chosen[name], rows.shape) for name in _PER_REQUEST}
    spread["positions"] = _spread("positions", start, rows.shape) + place.expand(rows.shape)
    request = inputs.request(rows, chosen | spread)
    logit_bias, penalties = chosen["logit_bias"], chosen["penalties"]
    if isinstance(logit_bias, Tensor) and logit_bias.shape == (count, vocab):
        logit_bias = logit_bias[:, None].expand(target_logits.shape)
    elif isinstance(logit_bias, TokenBias) and logit_bias.token_ids.dim() != 2:
        pass  # the same for all rows, or of each place
    elif isinstance(logit_bias, Sequence):
        logit_bias = inputs.token_bias(logit_bias, requests, "requests").at_each(places)
    if penalties is not None:
        penalties = _penalties(inputs.checked(penalties), drafts, places)
    z = inputs.adjusted(flat, rows, logit_bias, penalties)
    call = SamplingCall(flat, z, request, ("seeds",))
    if draft_logprobs is None:
        accepted, stats = _sampled(call, drafts, lengths)
    else:
        accepted, stats = _rejected(call, drafts, inside, lengths, draft_logprobs)
    stats = as_trained(call, stats)
    logprobs = chosen["return_logprobs"]
    valid = stats.valid.view(rows.shape) & (place <= accepted[:, None])

    def padded(x: Tensor | None, padding: float) -> Any:
        return None if x is None else torch.where(valid, x.view(rows.shape), padding)

    return VerifyOutput(
        token_ids=padded(stats.token_ids, -1),
        accepted=accepted,
        raw_logprobs=padded(stats.raw_logprobs, 0.0),
        tempered_logprobs=padded(stats.tempered_logprobs, 0.0) if "tempered" in logprobs else None,
        processed_logprobs=padded(stats.processed_logprobs, 0.0) if "processed" in logprobs else None,
        valid=valid,
    )


def _checked(
    drafts: Tensor, logits: Tensor, draft_logprobs: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    _validate.floating("target_logits", logits)
    if logits.dim() != 3 or logits.shape[1] == 0 or logits.shape[2] == 0:
        want = "[B, K + 1, V] with K >= 0 and V >= 1"
        raise ValueError(f"target_logits must be {want}, got {tuple(logits.shape)}")
    rows, places, vocab = logits.shape
    shape, whose = torch.Size((rows, places - 1)), "the places of target_logits"
    drafts = _validate.target_ids(drafts, shape, whose, logits.device, "draft_token_ids")
    if draft_logprobs is not None:
        _validate.constant("draft_logprobs", draft_logprobs)
        if draft_logprobs.shape != (*shape, vocab):
            got = tuple(draft_logprobs.shape)
            raise ValueError(f"draft_logprobs must be {(*shape, vocab)}, got {got}")
        _validate.same_device("draft_logprobs", draft_logprobs, "target_logits", logits.device)
    if lengths is None:
        return drafts, torch.full((rows,), places - 1, device=logits.device)
    if not isinstance(lengths, Tensor) or lengths.dtype not in numbers.INTEGERS or lengths.shape != (rows,):
        want = f"integers of shape ({rows},)"
        raise ValueError(f"draft_lengths must be {want}, got {numbers.described(lengths)}")
    _validate.same_device("draft_lengths", lengths, "target_logits", logits.device)
    allowed = _validate.Range(0, places - 1, False, f"in [0, {places - 1}]")
    _validate.look("draft_lengths", lengths, allowed.holds, allowed.want)
    return drafts, lengths.to(torch.int64)


SLACK = {torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of a sum of probabilities whose logarithms are rounded


def _distributions(draft_logprobs: Tensor, inside: Tensor, lengths: Tensor) -> None:
    """Looks whether the rows of q are distributions where a draft is; where one was taken out, or empty."""
    if not debug.may_read(draft_logprobs) or draft_logprobs.numel() == 0:
        return
    wide = torch.promote_types(draft_logprobs.dtype, torch.float32)
    total = draft_logprobs.detach().to(wide).exp().sum(-1)
    drafted = torch.arange(total.shape[1], device=total.device) < lengths[:, None]
    good = ((total - 1).abs() <= SLACK.get(draft_logprobs.dtype, 1e-3)) | (~inside & (total == 0))
    bad = (drafted & ~good).nonzero()
    if len(bad):
        b, j = bad[0].tolist()
        want = "normalised log-probabilities, of which exp sums to 1"
        raise ValueError(f"draft_logprobs[{b}, {j}] must be {want}, got a sum of {total[b, j].item():g}")


def _spread(argument: str, value: Any, shape: torch.Size) -> Any:
    """One value for each place, of one for each request."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != shape[:1]:
        want = f"one value or have shape {tuple(shape[:1])}"
        raise ValueError(f"{argument} must be {want}, got {tuple(value.shape)}")
    return value[:, None].expand(shape)


def _penalties(penalties: Penalties, drafts: Tensor, places: int) -> Penalties:
    """For each place, with the drafts before it behind the output."""
    said = penalties.output_token_ids
    if not isinstance(said, Tensor) or said.dim() != 2 or said.shape[0] != drafts.shape[0]:
        got = tuple(said.shape) if isinstance(said, Tensor) else type(said).__name__
        raise ValueError(f"penalties.output_token_ids must be [{drafts.shape[0]}, L], got {got}")
    before = (
        torch.arange(places - 1, device=drafts.device) < torch.arange(places, device=drafts.device)[:, None]
    )
    counted = torch.where(before, drafts[:, None], -1)
    wide = torch.cat([said[:, None].expand(-1, places, -1), counted.to(said.dtype)], -1)
    return penalties.repeated(places)._replace(output_token_ids=wide.flatten(0, 1))


def _sampled(call: SamplingCall, drafts: Tensor, lengths: Tensor) -> tuple[Tensor, SampleStats]:
    stats = draw(call)
    rows, count = drafts.shape
    token_ids, valid = (x.view(rows, count + 1)[:, :count] for x in (stats.token_ids, stats.valid))
    return _leading((drafts == token_ids) & valid, lengths), stats


def _rejected(
    call: SamplingCall, drafts: Tensor, inside: Tensor, lengths: Tensor, draft_logprobs: Tensor
) -> tuple[Tensor, SampleStats]:
    rows, count = drafts.shape
    device = drafts.device
    # the last place has no draft; the place where a row ends is scored below, with the token drawn there
    scored = draw(call.scoring(torch.nn.functional.pad(drafts, (0, 1)).flatten()))
    p = scored.processed_logprobs.view(rows, count + 1)[:, :count].double()
    q = draft_logprobs.gather(-1, drafts[..., None])[..., 0].double()
    u = stream.uniform64(Domain.ACCEPT, *call.request.key).view(rows, count + 1)[:, :count]
    with invariance.own_figures():
        ratio = (p - q).exp()
    # of NaN no comparison is true; a draft that q cannot draw was not drawn from q
    accepted = _leading(inside & (q > -torch.inf) & (u < ratio), lengths)

    end = torch.arange(rows, device=device) * (count + 1) + accepted
    there = SamplingCall(
        call.logits[end],
        None if call.adjusted is None else call.adjusted[end],
        call.request.each(lambda x: x[end]),
        ("seeds", "support"),
    )
    # Where a draft is missing the drafter may have drawn one with the numbers of (seed, position) and
    # dropped it for its value: what they draw is no longer distributed as p.
    own = stream.seeds_of(Domain.BONUS, *there.request.key)
    asks = there.request._replace(seeds=own, raw=False, support=call.logits.shape[1], softmax=True)
    drawn = draw(there._replace(request=asks))
    token = drawn.token_ids
    if count:
        q = draft_logprobs[torch.arange(rows, device=device), accepted.clamp(max=count - 1)]
        token = torch.where(accepted < lengths, _residual(there, q, drawn), token)
    final = draw(there.scoring(token.clamp(min=0)))
    final = final._replace(token_ids=torch.where(drawn.valid, token, -1), valid=drawn.valid)
    return accepted, SampleStats._make(
        None if x is None or y is None else x.index_copy(0, end, y)
        for x, y in zip(scored, final, strict=True)
    )


def _residual(call: SamplingCall, q: Tensor, drawn: SampleStats) -> Tensor:
    """A token of each row from max(p - q, 0); from p where that is 0 everywhere.

    Integer masses, as in ``sample``: their sums are the same in any order, so a row's token depends on
    nothing but the row.
    """
    assert drawn.support is not None and drawn.row_max is not None
    z, vocab = call.logits if call.adjusted is None else call.adjusted, call.logits.shape[1]
    ids = torch.where(drawn.support < 0, vocab, drawn.support).long()
    kept = torch.zeros(z.shape[0], vocab + 1, dtype=torch.bool, device=z.device).scatter_(1, ids, True)
    # a row that keeps its whole vocabulary has no support
    kept = kept[:, :vocab] | (drawn.support[:, :1] < 0)
    t: Any = call.request.temperature
    t = torch.where(t == 0, 1, t)[:, None] if isinstance(t, Tensor) else t or 1.0
    with invariance.own_figures():
        e = ((z.double() - drawn.row_max[:, None].double()) / t).exp()
        drafted = q.double().exp()
    mass = torch.where(kept & e.isfinite(), e * calls.MASS_ONE, 0).round()
    rest = (mass / mass.to(torch.int64).sum(-1, keepdim=True) - drafted).clamp(min=0)
    largest = rest.amax(-1, keepdim=True)
    mass = torch.where(largest > 0, (rest / largest * calls.MASS_ONE).round(), mass).to(torch.int64)
    sums = mass.cumsum(-1)
    u = stream.uniform53(Domain.RESIDUAL, *call.request.key)[:, None]
    place = torch.minimum((u * sums[:, -1:].double()).to(torch.int64), sums[:, -1:] - 1)
    return (sums <= place).sum(-1).clamp(max=vocab - 1)


def _leading(taken: Tensor, lengths: Tensor) -> Tensor:
    """How many of [B, K] are true before the first that is not, of the first ``lengths``."""
    inside = torch.arange(taken.shape[1], device=taken.device) < lengths[:, None]
    return (taken & inside).to(torch.int64).cumprod(-1).sum(-1)
