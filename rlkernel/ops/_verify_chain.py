"""Speculative decoding: which drafted tokens the target model keeps, by the random stream of ``sample``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling, VerifyOutput
from rlkernel.ops import _sampling_inputs as inputs
from rlkernel.ops import _validate
from rlkernel.ops import sampling as op
from rlkernel.ops._penalties import Penalties
from rlkernel.ops._token_bias import LogitBias, TokenBias
from rlkernel.runtime import debug, stream

MASS_ONE = 2.0**40


def verify_chain(
    draft_token_ids: Tensor,
    target_logits: Tensor,
    *,
    draft_logprobs: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    top_n_sigma: float | Tensor | None = None,
    epsilon_cutoff: float | Tensor | None = None,
    eta_cutoff: float | Tensor | None = None,
    top_a: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    xtc_probability: float | Tensor | None = None,
    xtc_threshold: float | Tensor = inputs.XTC_THRESHOLD,
    seeds: int | Tensor | None = None,
    positions: int | Tensor | None = None,
    token_bitmask: Tensor | None = None,
    logit_bias: LogitBias | None = None,
    penalties: Penalties | None = None,
    filter_order: str = "sequential",
    method: str = "grouped",
    return_logprobs: tuple[str, ...] = inputs.LOGPROBS,
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
    """
    drafts, lengths = _checked(draft_token_ids, target_logits, draft_logprobs, draft_lengths)
    inside = (drafts >= 0) & (drafts < target_logits.shape[2])
    drafts = torch.where(inside, drafts, 0)
    if draft_logprobs is None:
        lengths = _leading(inside, lengths)
    else:
        _distributions(draft_logprobs, inside, lengths)
    rows, places = target_logits.shape[:2]
    shape, flat = inputs.rows_of(target_logits)
    each = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "top_n_sigma": top_n_sigma,
        "epsilon_cutoff": epsilon_cutoff,
        "eta_cutoff": eta_cutoff,
        "top_a": top_a,
        "typical_p": typical_p,
        "xtc_probability": xtc_probability,
        "xtc_threshold": xtc_threshold,
    }
    first: Any = 0 if positions is None else positions
    of: Any = inputs.int64 if isinstance(first, Tensor) else inputs.int64_of
    start = _spread("positions", of("positions", first), shape)
    place = torch.arange(places, device=flat.device)
    if seeds is None:  # one for a row, not for a place
        seeds = inputs.sampling(shape[:1], 1, flat.dtype, flat.device, **_NOTHING).seeds
    assert seeds is not None
    request = inputs.sampling(
        shape, flat.shape[1], flat.dtype, flat.device,
        **{name: _spread(name, value, shape) for name, value in each.items()},
        seeds=_spread("seeds", seeds, shape), positions=start + place.expand(shape), token_ids=None,
        token_bitmask=token_bitmask, filter_order=filter_order, method=method,
        return_logprobs=return_logprobs, return_entropy=False, return_rank=False, return_support=0,
    )  # fmt: skip
    if isinstance(logit_bias, Tensor) and logit_bias.shape == (rows, flat.shape[1]):
        logit_bias = logit_bias[:, None].expand(target_logits.shape)
    elif isinstance(logit_bias, Sequence) and not isinstance(logit_bias, TokenBias):
        if len(logit_bias) != rows:
            want = f"one dict or None for each of {rows} requests"
            raise ValueError(f"logit_bias must be {want}, got {len(logit_bias)}")
        logit_bias = TokenBias.of(logit_bias, flat.shape[1], flat.device)
    if isinstance(logit_bias, TokenBias) and logit_bias.token_ids.dim() == 2:
        logit_bias = logit_bias.flat(shape[:1]).at_each(places)
    if penalties is not None:
        penalties = _penalties(inputs.checked(penalties), drafts, places)
    z = inputs.adjusted(flat, shape, logit_bias, penalties)
    if draft_logprobs is None:
        accepted, stats = _sampled(flat, z, request, drafts, lengths)
    else:
        accepted, stats = _rejected(flat, z, request, drafts, inside, lengths, draft_logprobs)
    valid = stats.valid.view(shape) & (place <= accepted[:, None])

    def padded(x: Tensor | None, padding: float) -> Any:
        return None if x is None else torch.where(valid, x.view(shape), padding)

    return VerifyOutput(
        token_ids=padded(stats.token_ids, -1),
        accepted=accepted,
        raw_logprobs=padded(stats.raw_logprobs, 0.0),
        tempered_logprobs=padded(stats.tempered_logprobs, 0.0) if "tempered" in return_logprobs else None,
        processed_logprobs=padded(stats.processed_logprobs, 0.0) if "processed" in return_logprobs else None,
        valid=valid,
    )


_NOTHING: dict[str, Any] = {
    "temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "top_n_sigma": None, "seeds": None,
    "positions": None, "token_ids": None, "token_bitmask": None, "filter_order": "sequential",
    "method": "grouped", "return_logprobs": (), "return_entropy": False, "return_rank": False,
    "return_support": 0,
}  # fmt: skip


def _checked(
    drafts: Tensor, logits: Tensor, draft_logprobs: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    _validate.floating("target_logits", logits)
    if logits.dim() != 3 or logits.shape[1] == 0 or logits.shape[2] == 0:
        want = "[B, K + 1, V] with K >= 0 and V >= 1"
        raise ValueError(f"target_logits must be {want}, got {tuple(logits.shape)}")
    rows, places, vocab = logits.shape
    drafts = _validate.target_ids(
        drafts,
        torch.Size((rows, places - 1)),
        "the places of target_logits",
        logits.device,
        "draft_token_ids",
    )
    if draft_logprobs is not None:
        _validate.constant("draft_logprobs", draft_logprobs)
        if draft_logprobs.shape != (rows, places - 1, vocab):
            want = f"{(rows, places - 1, vocab)}"
            raise ValueError(f"draft_logprobs must be {want}, got {tuple(draft_logprobs.shape)}")
        _validate.same_device("draft_logprobs", draft_logprobs, "target_logits", logits.device)
    if lengths is None:
        return drafts, torch.full((rows,), places - 1, device=logits.device)
    if not isinstance(lengths, Tensor) or lengths.dtype not in inputs.INTEGERS or lengths.shape != (rows,):
        got = type(lengths).__name__
        if isinstance(lengths, Tensor):
            got = f"{_validate.name(lengths.dtype)} {tuple(lengths.shape)}"
        raise ValueError(f"draft_lengths must be integers of shape ({rows},), got {got}")
    _validate.same_device("draft_lengths", lengths, "target_logits", logits.device)
    if debug.may_read(lengths) and rows:
        bad = (lengths < 0) | (lengths >= places)
        if bad.any():
            at = int(bad.nonzero()[0])
            raise ValueError(f"draft_lengths[{at}] must be in [0, {places - 1}], got {lengths[at].item()}")
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


def _sampled(
    logits: Tensor, z: Tensor | None, request: Sampling, drafts: Tensor, lengths: Tensor
) -> tuple[Tensor, SampleStats]:
    stats = op.draw(logits, z, request, frozenset({"seeds"}))
    rows, count = drafts.shape
    token_ids, valid = (x.view(rows, count + 1)[:, :count] for x in (stats.token_ids, stats.valid))
    same = (drafts == token_ids) & valid
    return _leading(same, lengths), stats


def _rejected(
    logits: Tensor,
    z: Tensor | None,
    request: Sampling,
    drafts: Tensor,
    inside: Tensor,
    lengths: Tensor,
    draft_logprobs: Tensor,
) -> tuple[Tensor, SampleStats]:
    rows, count = drafts.shape
    vocab = logits.shape[1]
    assert request.seeds is not None and request.positions is not None
    run, needs = op.draw, frozenset({"token_ids"})
    # the last place has no draft; the place where a row ends is scored below, with the token drawn there
    forced = torch.nn.functional.pad(drafts, (0, 1)).flatten()
    scored = run(logits, z, request._replace(token_ids=forced, seeds=None, positions=None), needs)
    p = scored.processed_logprobs.view(rows, count + 1)[:, :count].double()
    q = draft_logprobs.gather(-1, drafts[..., None])[..., 0].double()
    u = stream.uniform64(stream.ACCEPT, request.seeds, request.positions)
    # of NaN no comparison is true; a draft that q cannot draw was not drawn from q
    taken = inside & (q > -torch.inf) & (u.view(rows, count + 1)[:, :count] < (p - q).exp())
    accepted = _leading(taken, lengths)

    end = torch.arange(rows, device=logits.device) * (count + 1) + accepted
    last, last_z = logits[end], None if z is None else z[end]
    fields: list[Any] = [x[end] if isinstance(x, Tensor) else x for x in request]
    there = Sampling(*fields)
    assert there.seeds is not None and there.positions is not None
    # Where a draft is missing the drafter may have drawn one with the numbers of (seed, position) and
    # dropped it for its value: what they draw is no longer distributed as p.
    own = stream.seeds_of(stream.BONUS, there.seeds, there.positions)
    plain = there._replace(seeds=own, raw=False, support=vocab)
    drawn = run(last, last_z, plain, frozenset({"seeds", "support"}))
    token = drawn.token_ids
    if count:
        q = draft_logprobs[torch.arange(rows, device=logits.device), accepted.clamp(max=count - 1)]
        instead = _residual(last if last_z is None else last_z, q, there, drawn)
        token = torch.where(accepted < lengths, instead, token)
    forced_there = there._replace(token_ids=token.clamp(min=0), seeds=None, positions=None)
    final = run(last, last_z, forced_there, needs)
    valid = drawn.valid
    final = final._replace(token_ids=torch.where(valid, token, -1), valid=valid)
    merged: list[Any] = [
        None if x is None or y is None else x.index_copy(0, end, y)
        for x, y in zip(scored, final, strict=True)
    ]
    return accepted, SampleStats(*merged)


def _residual(z: Tensor, q: Tensor, request: Sampling, drawn: SampleStats) -> Tensor:
    """A token of each row from max(p - q, 0); from p where that is 0 everywhere.

    Integer masses, as in ``sample``: their sums are the same in any order, so a row's token depends on
    nothing but the row.
    """
    assert drawn.support is not None and request.seeds is not None and request.positions is not None
    vocab = z.shape[1]
    ids = torch.where(drawn.support < 0, vocab, drawn.support).long()
    kept = torch.zeros(z.shape[0], vocab + 1, dtype=torch.bool, device=z.device).scatter_(1, ids, True)
    # a row that keeps its whole vocabulary has no support
    kept = kept[:, :vocab] | (drawn.support[:, :1] < 0)
    t: Any = request.temperature
    t = torch.where(t == 0, 1, t)[:, None] if isinstance(t, Tensor) else t or 1.0
    e = ((z.double() - drawn.row_max[:, None].double()) / t).exp()
    mass = torch.where(kept & e.isfinite(), e * MASS_ONE, 0).round()
    rest = (mass / mass.to(torch.int64).sum(-1, keepdim=True) - q.double().exp()).clamp(min=0)
    largest = rest.amax(-1, keepdim=True)
    mass = torch.where(largest > 0, (rest / largest * MASS_ONE).round(), mass).to(torch.int64)
    sums = mass.cumsum(-1)
    u = stream.uniform53(stream.RESIDUAL, request.seeds, request.positions)[:, None]
    place = torch.minimum((u * sums[:, -1:].double()).to(torch.int64), sums[:, -1:] - 1)
    return (sums <= place).sum(-1).clamp(max=vocab - 1)


def _leading(taken: Tensor, lengths: Tensor) -> Tensor:
    """How many of [B, K] are true before the first that is not, of the first ``lengths``."""
    inside = torch.arange(taken.shape[1], device=taken.device) < lengths[:, None]
    return (taken & inside).to(torch.int64).cumprod(-1).sum(-1)
