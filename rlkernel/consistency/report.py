"""What ``compare`` found: fields, a printed table, other frameworks' metrics, a picture."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.consistency import styles
from rlkernel.consistency.statistics import Sequences, Tokens
from rlkernel.runtime import invariance

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
TAIL_SHARES = tuple(50 * 10 ** (-k / 8) for k in range(57))  # percent, thinning out to 5e-6


class WorstToken(NamedTuple):
    """``row`` is the row of [B, L], or the sequence of packed ones, ``position`` the token's place in it.

    ``ulps`` is None where a side is not finite.
    """

    row: int
    position: int
    train: float
    rollout: float
    difference: float
    ulps: int | None


class Kl(NamedTuple):
    k1: float
    k2: float
    k3: float


class Points(NamedTuple):
    """Every so many-th token, for a picture: [n] each, on the CPU."""

    train: Tensor
    rollout: Tensor

    @classmethod
    def empty(cls) -> "Points":
        return cls(
            torch.empty(0, dtype=torch.float64, device="cpu"),
            torch.empty(0, dtype=torch.float64, device="cpu"),
        )

    def with_some(self, train: Tensor, rollout: Tensor, first: int, every: int) -> "Points":
        more = (x[first::every].double().cpu() for x in (train, rollout))
        return Points(*(torch.cat(pair) for pair in zip(self, more, strict=True)))


@dataclass(frozen=True, eq=False)
class Report:
    """``compare`` says what the quantities are.  Without a compared token means and shares are NaN.

    ``print(report)`` shows a table.
    """

    dtypes: tuple[torch.dtype, torch.dtype]  # of the trainer's and the rollout's log-probabilities
    tokens: int  # whose mask is set
    equal: (
        int  # of them, those with the same bits on both sides, in the wider of the two dtypes; NaN never is
    )
    compared: int  # finite on both sides: what all below is of
    invalid: int  # NaN or +inf on a side
    no_mass_train: int  # -inf on the trainer's side alone
    no_mass_rollout: int
    no_mass_both: int  # -inf on both, which is equal
    sequences: int  # with a compared token
    ulp_histogram: tuple[int, ...]  # [k]: tokens that are 0 (k = 0), or 2^(k-1) to 2^k - 1 ULPs apart
    ulp_max: int
    percentiles: dict[float, float]  # of |delta|
    ess_token: float
    ess_sequence: float
    worst: tuple[WorstToken, ...]
    clip: tuple[float, float]
    bounds: tuple[float | None, float | None] | None
    has_advantages: bool
    elements: int = field(repr=False)  # with those behind the mask
    token_statistics: Tokens = field(repr=False)
    sequence_statistics: Sequences = field(repr=False)
    points: Points = field(repr=False)
    tails: tuple[float, ...] = field(repr=False)  # delta, TAIL_SHARES from below to the middle and on

    @property
    def identical(self) -> bool:
        """Whether every token has the same bits on both sides, and there is one."""
        return 0 < self.tokens == self.equal

    @property
    def equal_fraction(self) -> float:
        return self.equal / self.tokens if self.tokens else math.nan

    @property
    def mean_difference(self) -> float:
        """mean(delta)"""
        return self.token_statistics.mean("delta")

    @property
    def mean_abs_difference(self) -> float:
        return self.token_statistics.mean("abs")

    @property
    def std_abs_difference(self) -> float:
        """Of |delta|, with n - 1."""
        return math.sqrt(self.token_statistics.variance("abs"))

    @property
    def max_abs_difference(self) -> float:
        return self.token_statistics.maximum("abs")

    @property
    def kl(self) -> Kl:
        """Estimates of KL(rollout || train), from tokens that the rollout drew."""
        t = self.token_statistics
        return Kl(0.0 - t.mean("delta"), t.mean("square") / 2, t.mean("k3"))

    @property
    def kl_reverse(self) -> Kl:
        """Estimates of KL(train || rollout) from the same tokens, weighted by their ratio."""
        t = self.token_statistics
        return Kl(t.mean("ratio_delta"), t.mean("ratio_square") / 2, t.mean("ratio_k3"))

    @property
    def chi2_token(self) -> float:
        return self.token_statistics.mean("chi2")

    @property
    @invariance.aside()
    def chi2_sequence(self) -> float:
        sums = self._sequence_deltas()
        return float(torch.expm1(2 * sums).mean()) if len(sums) else math.nan

    @property
    def ratio_mean(self) -> float:
        return self.token_statistics.mean("ratio")

    @property
    def ratio_min(self) -> float:
        return self.token_statistics.minimum("ratio")

    @property
    def ratio_max(self) -> float:
        return self.token_statistics.maximum("ratio")

    @property
    @invariance.aside()
    def sequence_ratios(self) -> tuple[float, float, float]:
        """The least, the mean and the largest exp(sum of delta) of a sequence."""
        ratios = self._sequence_deltas().exp()
        if not len(ratios):
            return math.nan, math.nan, math.nan
        return float(ratios.min()), float(ratios.mean()), float(ratios.max())

    @property
    def outside_clip(self) -> tuple[float, float]:
        """The shares of tokens with a ratio below and above the clip range."""
        t = self.token_statistics
        return t.mean("clip_low"), t.mean("clip_high")

    @property
    def clipped(self) -> float | None:
        """The share that PPO's clip holds back, by the signs of the advantages; None without them."""
        return self.token_statistics.mean("clipped") if self.has_advantages else None

    def _sequence_deltas(self) -> Tensor:
        s = self.sequence_statistics
        return s.total("delta")[s.counts > 0]

    def __str__(self) -> str:
        from rlkernel.consistency import table  # which reads a report

        return table.text(self)

    @invariance.aside()
    def plot(self, path: str | Path) -> None:
        """Draw log-probabilities, ULPs and the tails of the ratio into a file.

        ``path`` ending in .html needs no package; .png, .svg and .pdf need matplotlib.

        Raises:
            ValueError: no token was compared.
            ImportError: matplotlib is needed and missing.
        """
        from rlkernel.consistency import picture  # which reads a report

        picture.save(self, path)

    @invariance.aside()
    def to_metrics(self, style: str, **options: Any) -> dict[str, float]:
        """The figures under the names, and by the formulas, of another framework.

        Args:
            style: one of ``STYLES``
            **options: what of the framework's settings the figures depend on, see docs/consistency.md

        Raises:
            ValueError: the style or an option is unknown, or needs ``compare(bounds=...)``.
        """
        return styles.metrics(self, style, options)
