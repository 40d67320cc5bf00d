"""``compare``: two sets of log-probabilities of the same tokens."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.consistency import bits, statistics
from rlkernel.consistency.report import PERCENTILES, TAIL_SHARES, Points, Report, WorstToken
from rlkernel.ops import _packing, _validate
from rlkernel.runtime import invariance

POINTS = 4096  # that a picture shows
_DPPO = 0.2  # of prime-rl's default loss: dppo_mask_low and dppo_mask_high


@torch.no_grad()
@invariance.aside()
def compare(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    advantages: Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    bounds: tuple[float | None, float | None] | None = None,
    worst: int = 8,
) -> Report:
    """How far the log-probabilities of a trainer are from those that the rollout engine reported.

    With ``delta = train_logprobs - rollout_logprobs`` in fp64 over the tokens whose mask is set, the tokens
    having been drawn by the engine, and ``r = exp(delta)``::

        kl          k1 = mean(-delta)    k2 = mean(delta^2 / 2)    k3 = mean(expm1(delta) - delta)
        kl_reverse  k1 = mean(r delta)   k2 = mean(r delta^2 / 2)  k3 = mean(r delta - expm1(delta))
        chi2        mean(r^2) - 1        ess = (sum r)^2 / (n sum r^2)

    of tokens, and chi2 and ess also of sequences, where r is the exponential of a sequence's sum.

    Args:
        train_logprobs: [B, L], or [N] with ``cu_seqlens`` or ``sequence_ids``
        rollout_logprobs: the same shape, any floating dtype
        mask: the same shape, nonzero where a token counts; what stands elsewhere is not looked at
        cu_seqlens: [S + 1] offsets of packed sequences; tokens behind the last one are padding
        sequence_ids: the logprobs' shape, integers: a sequence begins where they change, and with each row
        advantages: the logprobs' shape or one a sequence; they tell which tokens the clip range holds back
        clip: PPO's (low, high): a token is outside where r < 1 - low or r > 1 + high
        bounds: (low, high) of the importance weight, by which a framework truncates or rejects; for the
            metrics of such corrections in ``Report.to_metrics``
        worst: how many of the tokens that differ most are listed

    A token with NaN or +inf on a side is ``invalid``; one with -inf has no mass on that side.  Both are
    counted, are listed first among the worst, and are part of no mean, which they would swallow.  Without any
    other token means are NaN.

    Raises:
        ValueError: a shape, dtype or device differs, or a bound is not a number that it can be.

    Examples:
        >>> train, rollout = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.0, -2.5, -3.0]])
        >>> report = rlkernel.consistency.compare(train, rollout)
        >>> report.tokens, report.equal, report.worst[0].difference
        (3, 2, 0.5)
    """
    _validate.floating("train_logprobs", train_logprobs)
    _validate.floating("rollout_logprobs", rollout_logprobs)
    _validate.like("rollout_logprobs", rollout_logprobs, "train_logprobs", train_logprobs)
    mask = _validate.mask(mask, "train_logprobs", train_logprobs)
    offsets = _offsets(train_logprobs, cu_seqlens, sequence_ids)
    if advantages is not None:
        _validate.floating("advantages", advantages)
        _validate.same_device("advantages", advantages, "train_logprobs", train_logprobs.device)
        advantages = _per_token(advantages, train_logprobs, offsets, cu_seqlens)
    options = statistics.Options(*_pair("clip", clip), *_bounds(bounds), tv=_DPPO)
    if isinstance(worst, bool) or not isinstance(worst, int) or worst < 0:
        raise ValueError(f"worst must be an integer >= 0, got {worst!r}")

    flat = _Flat(train_logprobs.reshape(-1), rollout_logprobs.reshape(-1))
    dtype = torch.promote_types(train_logprobs.dtype, rollout_logprobs.dtype)
    count = _Counts()
    device = train_logprobs.device
    totals = statistics.Totals(len(offsets) - 1, device)
    deltas = torch.empty(len(flat.train), dtype=torch.float64, device=device)
    steps = torch.zeros(65, dtype=torch.int64, device=device)
    furthest = 0
    found: list[list[statistics.Worst]] = []
    points = Points.empty()
    every = max(1, len(flat.train) // POINTS)
    kept = None if mask is None else mask.reshape(-1)
    given = None if advantages is None else advantages.reshape(-1)

    for start, end, first, lengths in _chunks(offsets):
        a, b = flat.train[start:end].to(dtype), flat.rollout[start:end].to(dtype)
        counted = torch.ones_like(a, dtype=torch.bool) if kept is None else kept[start:end]
        seen = count.add(a, b, counted)
        far = torch.where(seen.one_sided, torch.inf, torch.where(seen.invalid, torch.nan, 0.0)).double()
        here = seen.compared.nonzero()[:, 0]
        a, b = a[here], b[here]
        apart = bits.ulps(a, b)
        steps += statistics.histogram(apart)
        furthest = max(furthest, int(apart.max()) if len(apart) else 0)
        given_here = None if given is None else given[start:end][here].double()
        values = statistics.rows(a.double(), b.double(), given_here, options)
        delta = values[statistics.ROWS.index("delta")]
        deltas[totals.n : totals.n + len(here)] = delta
        points = points.with_some(a, b, -totals.n % every, every)
        totals.add(values, first, _counted(seen.compared, lengths.to(device)))
        far[here] = delta.abs()
        found.append([x._replace(place=x.place + start) for x in statistics.worst(far, worst)])

    tokens, sequences = totals.done()
    deltas = deltas[: tokens.n]
    named = statistics.merged(found, worst)
    place = _Places(train_logprobs, offsets, cu_seqlens is not None)
    return Report(
        dtypes=(train_logprobs.dtype, rollout_logprobs.dtype),
        tokens=count.tokens,
        equal=count.equal,
        compared=tokens.n,
        invalid=count.invalid,
        no_mass_train=count.no_mass_train,
        no_mass_rollout=count.no_mass_rollout,
        no_mass_both=count.no_mass_both,
        sequences=int((sequences.counts > 0).sum()),
        ulp_histogram=tuple(steps.tolist()),
        ulp_max=furthest,
        percentiles=dict(zip(PERCENTILES, statistics.percentiles(deltas.abs(), PERCENTILES), strict=True)),
        ess_token=statistics.effective_share(deltas),
        ess_sequence=statistics.effective_share(sequences.total("delta")[sequences.counts > 0]),
        worst=tuple(_described(x, flat, dtype, place) for x in named),
        has_advantages=advantages is not None,
        bounds=bounds,
        clip=(options.clip_low, options.clip_high),
        elements=train_logprobs.numel(),
        token_statistics=tokens,
        sequence_statistics=sequences,
        points=points,
        tails=_tails(deltas),
    )


class _Flat(NamedTuple):
    train: Tensor
    rollout: Tensor


def _pair(name: str, pair: tuple[float, float]) -> tuple[float, float]:
    _is_pair(name, pair)
    low, high = (_validate.number(f"{name}[{i}]", x, 0.0) for i, x in enumerate(pair))
    return low, high


def _is_pair(name: str, pair: Any) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name} must be two numbers, (low, high), got {pair!r}")


def _bounds(bounds: tuple[float | None, float | None] | None) -> tuple[float, float]:
    if bounds is None:
        return 0.0, torch.inf
    _is_pair("bounds", bounds)
    low, high = bounds
    low = 0.0 if low is None else _validate.number("bounds[0]", low, 0.0)
    high = torch.inf if high is None else _validate.number("bounds[1]", high, low, above=True)
    return low, high


def _offsets(logprobs: Tensor, cu_seqlens: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
    """[S + 1] of the sequences, in the tokens laid side by side, on the CPU."""
    if cu_seqlens is not None and sequence_ids is not None:
        raise ValueError("sequence_ids must be None where cu_seqlens are given, got both")
    if sequence_ids is not None:
        if logprobs.dim() not in (1, 2):
            raise ValueError(f"train_logprobs must be [B, L] or [N], got {tuple(logprobs.shape)}")
        _validate.is_tensor("sequence_ids", sequence_ids)
        if sequence_ids.is_floating_point() or sequence_ids.is_complex() or sequence_ids.dtype == torch.bool:
            raise ValueError(f"sequence_ids must be integers, got {_validate.name(sequence_ids.dtype)}")
        _validate.like("sequence_ids", sequence_ids, "train_logprobs", logprobs)
        begins = torch.ones_like(sequence_ids, dtype=torch.bool)
        begins[..., 1:] = sequence_ids[..., 1:] != sequence_ids[..., :-1]
        found = begins.reshape(-1).nonzero()[:, 0].cpu()
        return torch.cat([found, found.new_tensor([logprobs.numel()])])
    offsets, count = _packing.sequences("train_logprobs", logprobs, "[B, L]", cu_seqlens)
    if offsets is None:
        return torch.arange(count + 1, device="cpu") * logprobs.shape[1]
    offsets = offsets.cpu()  # where looking costs nothing more
    _packing.check(offsets, len(logprobs))
    return offsets


def _per_token(advantages: Tensor, logprobs: Tensor, offsets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    count = len(offsets) - 1
    values, each = _packing.per_sequence("advantages", advantages, "train_logprobs", logprobs, count)
    if not each:
        return values
    lengths = offsets.diff().to(values.device)
    spread = values.repeat_interleave(lengths)
    if cu_seqlens is None:
        return spread
    return torch.nn.functional.pad(spread, (0, logprobs.numel() - len(spread)))


def _chunks(offsets: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
    """Where a chunk starts and ends, its first sequence, and how many of its tokens each sequence has."""
    total = int(offsets[-1]) if len(offsets) else 0
    for start in range(0, total, statistics.CHUNK):
        end = min(start + statistics.CHUNK, total)
        first = int(torch.searchsorted(offsets, start, right=True)) - 1
        last = int(torch.searchsorted(offsets, end))
        cut = offsets[first : last + 1].clamp(start, end)
        yield start, end, first, cut.diff()


def _counted(compared: Tensor, lengths: Tensor) -> Tensor:
    """How many of the next ``lengths`` tokens are compared."""
    before = torch.nn.functional.pad(compared.to(torch.int64).cumsum(0), (1, 0))
    return before[torch.nn.functional.pad(lengths.cumsum(0), (1, 0))].diff()


class _Seen(NamedTuple):
    """Of the counted tokens of a chunk."""

    compared: Tensor
    invalid: Tensor
    one_sided: Tensor


class _Counts:
    def __init__(self) -> None:
        self.tokens = self.equal = self.invalid = 0
        self.no_mass_train = self.no_mass_rollout = self.no_mass_both = 0

    def add(self, a: Tensor, b: Tensor, counted: Tensor) -> _Seen:
        invalid = counted & (a.isnan() | b.isnan() | a.isposinf() | b.isposinf())
        valid = counted & ~invalid
        none_a, none_b = valid & a.isneginf(), valid & b.isneginf()
        both = none_a & none_b
        equal = valid & (bits.as_integers(a) == bits.as_integers(b))
        masks = (counted, equal, invalid, none_a & ~both, none_b & ~both, both)
        tokens, same, bad, train, rollout, neither = torch.stack([x.sum() for x in masks]).tolist()
        self.tokens += tokens
        self.equal += same
        self.invalid += bad
        self.no_mass_train += train
        self.no_mass_rollout += rollout
        self.no_mass_both += neither
        return _Seen(valid & ~none_a & ~none_b, invalid, none_a ^ none_b)


class _Places:
    """Row and position of a token among those that lie side by side."""

    def __init__(self, logprobs: Tensor, offsets: Tensor, packed: bool) -> None:
        self.width = logprobs.shape[-1]
        self.offsets = offsets
        self.packed = packed

    def __call__(self, index: int) -> tuple[int, int]:
        if not self.packed:
            return divmod(index, self.width)
        row = int(torch.searchsorted(self.offsets, index, right=True)) - 1
        return row, index - int(self.offsets[row])


def _described(found: statistics.Worst, flat: _Flat, dtype: torch.dtype, place: _Places) -> WorstToken:
    at = slice(found.place, found.place + 1)
    a, b = flat.train[at].to(dtype), flat.rollout[at].to(dtype)
    apart = int(bits.ulps(a, b)) if bool(a.isfinite() & b.isfinite()) else None
    row, position = place(found.place)
    return WorstToken(row, position, a.item(), b.item(), float(a.double() - b.double()), apart)


def _tails(deltas: Tensor) -> tuple[float, ...]:
    """``deltas`` at shares that thin out towards both ends, for a picture."""
    above = (100 - share for share in TAIL_SHARES[1:])
    return tuple(statistics.percentiles(deltas, (*reversed(TAIL_SHARES), *above)))
