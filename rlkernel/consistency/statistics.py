"""What is summed over the tokens: one row of numbers for each quantity, in chunks, in fp64.

A row's count, mean, extremes and sum of squared deviations are all that a report or a framework's metric
needs of it; some rows are also summed for each sequence.  Chunks are cut at fixed places and merged in their
order, so that the same tensors give the same bits.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.consistency import bits

CHUNK = 32768  # tokens: some thirty rows of them are 8 MiB
CLAMP = 20.0  # of log ratios, in verl and SkyRL


class Options(NamedTuple):
    """Bounds of the ratio, 0 or infinite where there is none; ``tv``: of the difference of probabilities."""

    clip_low: float
    clip_high: float
    weight_low: float
    weight_high: float
    tv: float


ROWS = (
    "train",
    "rollout",
    "delta",  # train - rollout
    "abs",  # |delta|
    "square",  # delta^2
    "k3",  # expm1(delta) - delta
    "k3_of_minus",  # expm1(-delta) + delta
    "ratio",  # exp(delta)
    "chi2",  # ratio^2 - 1
    "ratio_delta",
    "ratio_square",  # ratio * delta^2
    "ratio_k3",  # ratio * delta - expm1(delta)
    "exp_abs",  # exp(|delta|)
    "ratio_off",  # |ratio - 1|
    "jensen",  # NeMo-RL's estimate of the Jensen-Shannon divergence
    "p_train",
    "p_rollout",
    "p_abs",
    "bounded",  # exp of the clamped delta
    "bounded_chi2",
    "clip_low",  # 1 where the ratio is below the clip range
    "clip_high",
    "under",  # 1 where it is below the bounds of the weights
    "over",
    "under_reciprocal",  # 1 where it is below 1 / the upper bound
    "truncated",  # min(bounded, upper bound)
    "clamped",  # ratio between the bounds
    "inside",  # ratio, 0 outside of the bounds
    "bounded_inside",
    "clipped",  # 1 where PPO's clip range holds the token back, for its advantage
    "moved",  # 1 where the probability moved by more than tv, as prime-rl's default loss counts
    "moved_low",
    "moved_high",
    "moved_k3",
)
PER_SEQUENCE = (
    "train", "rollout", "delta", "abs", "k3", "ratio_off", "ratio", "bounded", "truncated", "bounded_inside",
    "under", "over", "moved", "moved_low", "moved_high", "moved_k3",
)  # fmt: skip
_PROBABILITIES = [ROWS.index(name) for name in ("p_train", "p_rollout")]
_COLUMNS = [ROWS.index(name) for name in PER_SEQUENCE]


class Tokens(NamedTuple):
    """Of every row over all compared tokens, [len(ROWS)] each, on the CPU."""

    n: int
    means: Tensor
    deviations: Tensor  # sums of squared deviations
    least: Tensor
    most: Tensor
    codeviation: float  # the sum of products of the deviations of the two probabilities

    def mean(self, row: str) -> float:
        return float(self.means[ROWS.index(row)]) if self.n else math.nan

    def total(self, row: str) -> float:
        return float(self.means[ROWS.index(row)]) * self.n

    def minimum(self, row: str) -> float:
        return float(self.least[ROWS.index(row)]) if self.n else math.nan

    def maximum(self, row: str) -> float:
        return float(self.most[ROWS.index(row)]) if self.n else math.nan

    def squares(self, row: str) -> float:
        """The sum of squares."""
        k = ROWS.index(row)
        return float(self.deviations[k] + self.n * self.means[k] ** 2)

    def variance(self, row: str, *, unbiased: bool = True) -> float:
        n = self.n - unbiased
        return float(self.deviations[ROWS.index(row)]) / n if n > 0 else math.nan

    def correlation(self) -> float:
        """Pearson's, of the two probabilities."""
        a, b = (float(self.deviations[k]) for k in _PROBABILITIES)
        return self.codeviation / (math.sqrt(a) * math.sqrt(b)) if a > 0 and b > 0 else math.nan


class Sequences(NamedTuple):
    """Of every sequence, also of one without a compared token, on the CPU."""

    counts: Tensor  # [S] int64
    sums: Tensor  # [S, len(PER_SEQUENCE)]

    def total(self, row: str) -> Tensor:
        return self.sums[:, PER_SEQUENCE.index(row)]


def rows(train: Tensor, rollout: Tensor, advantages: Tensor | None, options: Options) -> Tensor:
    """[len(ROWS), n] of finite fp64 log-probabilities [n]."""
    delta = train - rollout
    ratio, excess = delta.exp(), delta.expm1()
    bounded = delta.clamp(-CLAMP, CLAMP).exp()
    k3 = excess - delta
    mixture = torch.logaddexp(train, rollout) - math.log(2)
    p, q = train.exp(), rollout.exp()
    below, above = ratio < 1 - options.clip_low, ratio > 1 + options.clip_high
    under, over = ratio < options.weight_low, ratio > options.weight_high
    inside = ~(under | over)
    zero = torch.zeros_like(delta)
    clipped = low = high = moved = zero.bool()
    if advantages is not None:
        up, down = advantages > 0, advantages < 0
        clipped = (up & above) | (down & below)
        rose, fell = p - q > options.tv, p - q < -options.tv
        moved = torch.where(up, rose, fell)
        low, high = down & fell, up & rose
    computed = {
        "train": train,
        "rollout": rollout,
        "delta": delta,
        "abs": delta.abs(),
        "square": delta.square(),
        "k3": k3,
        "k3_of_minus": torch.expm1(-delta) + delta,
        "ratio": ratio,
        "chi2": torch.expm1(2 * delta),
        "ratio_delta": ratio * delta,
        "ratio_square": ratio * delta.square(),
        # the second form where the first would be inf - inf, the first where the second cancels
        "ratio_k3": torch.where(delta > 1, excess * (delta - 1) + delta, delta * excess - k3),
        "exp_abs": delta.abs().exp(),
        "ratio_off": excess.abs(),
        "jensen": (_k3(train - mixture) + _k3(rollout - mixture)) / 2,
        "p_train": p,
        "p_rollout": q,
        "p_abs": (p - q).abs(),
        "bounded": bounded,
        "bounded_chi2": bounded.square() - 1,
        "clip_low": below,
        "clip_high": above,
        "under": under,
        "over": over,
        "under_reciprocal": ratio < 1 / options.weight_high,
        "truncated": bounded.clamp(max=options.weight_high),
        "clamped": ratio.clamp(options.weight_low, options.weight_high),
        "inside": torch.where(inside, ratio, zero),
        "bounded_inside": torch.where(inside, bounded, zero),
        "clipped": clipped,
        "moved": moved,
        "moved_low": low,
        "moved_high": high,
        "moved_k3": torch.where(moved, k3, zero),
    }
    return torch.stack([computed[name].to(delta.dtype) for name in ROWS])


def _k3(x: Tensor) -> Tensor:
    return torch.expm1(x) - x


class Totals:
    """Takes chunks of compared tokens, in order."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        self.n = 0
        self.totals = torch.zeros(len(ROWS), dtype=torch.float64, device=device)
        self.deviations = torch.zeros_like(self.totals)
        self.codeviation = self.totals.new_zeros(())
        self.least = torch.full_like(self.totals, math.inf)
        self.most = torch.full_like(self.totals, -math.inf)
        self.counts = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.sums = self.totals.new_zeros(sequences, len(PER_SEQUENCE))

    def add(self, values: Tensor, first: int, lengths: Tensor) -> None:
        """``values`` [len(ROWS), n] of the sequences from ``first`` on, ``lengths`` tokens of each."""
        n = values.shape[1]
        if n == 0:
            return
        total = values.sum(1)
        mean = total / n
        moved = mean - self.totals / max(self.n, 1)
        # the merge of Chan, Golub and LeVeque
        away = values - mean[:, None]
        share = self.n * n / (self.n + n)
        self.codeviation += away[_PROBABILITIES].prod(0).sum() + moved[_PROBABILITIES].prod() * share
        self.deviations += away.square_().sum(1) + moved.square() * share
        self.totals += total  # which stays infinite where an exponential was
        self.n += n
        self.least = torch.minimum(self.least, values.amin(1))
        self.most = torch.maximum(self.most, values.amax(1))
        here = slice(first, first + len(lengths))
        self.counts[here] += lengths
        columns = values[_COLUMNS].T.contiguous()
        self.sums[here] += torch.segment_reduce(columns, "sum", lengths=lengths, axis=0, unsafe=True)

    def done(self) -> tuple[Tokens, Sequences]:
        means = self.totals / max(self.n, 1)
        means, deviations, least, most = (x.cpu() for x in (means, self.deviations, self.least, self.most))
        tokens = Tokens(self.n, means, deviations, least, most, float(self.codeviation))
        return tokens, Sequences(self.counts.cpu(), self.sums.cpu())


class Worst(NamedTuple):
    """A token and how far its two values are apart: ``rank`` is |difference|, infinite where only one side
    is, NaN where one is no log-probability at all."""

    rank: float
    place: int


def worst(rank: Tensor, count: int) -> Iterator[Worst]:
    """The ``count`` largest of a chunk's ranks above 0, NaN first, and the first of those that are equal."""
    count = min(count, len(rank))
    if count == 0:
        return
    least = rank.topk(count).values[-1]
    found = (rank.isnan() | ((rank >= least) & (rank > 0))).nonzero()[:, 0]
    order = rank[found].sort(stable=True, descending=True).indices[:count]
    found = found[order]
    yield from (Worst(*pair) for pair in zip(rank[found].tolist(), found.tolist(), strict=True))


def merged(lists: list[list[Worst]], count: int) -> list[Worst]:
    """The largest of several chunks' lists, in whose order equals stay."""
    every = [x for one in lists for x in one]
    every.sort(key=lambda x: (not math.isnan(x.rank), -x.rank if not math.isnan(x.rank) else 0.0))
    return every[:count]


def effective_share(logs: Tensor) -> float:
    """Of the weights exp(logs): ``(sum w)^2 / (n sum w^2)``, 1 where all are equal, 1/n where one has all."""
    if not len(logs):
        return math.nan
    weights = (logs - logs.max()).exp_()
    return float(weights.sum() ** 2 / (len(logs) * weights.square().sum()))


def percentiles(values: Tensor, wanted: tuple[float, ...]) -> list[float]:
    """Linear between neighbours, which is numpy's default."""
    if not len(values):
        return [math.nan] * len(wanted)
    ordered = values.sort().values
    places = [share / 100 * (len(values) - 1) for share in wanted]
    low = ordered[[int(x) for x in places]].tolist()
    high = ordered[[math.ceil(x) for x in places]].tolist()
    return [a + (b - a) * (x - int(x)) for a, b, x in zip(low, high, places, strict=True)]


def histogram(ulps: Tensor) -> Tensor:
    """[65] counts by the number of binary digits."""
    return torch.bincount(bits.bit_lengths(ulps), minlength=65)
