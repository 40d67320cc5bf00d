"""What a backend is asked for ``running_normalize``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

from rlkernel.calls.whiten import WhitenCall


class RunningOutput(NamedTuple):
    """``normalized``, a constant without a gradient, and the new ``state`` [count, mean, M2] in fp64."""

    normalized: Tensor
    state: Tensor


class RunningNormalizeCall(NamedTuple):
    """Checked and normalised; all dense."""

    x: Tensor  # [...]
    mask: Tensor | None  # bool
    states: Tensor  # [R, 3] fp64, merged in their order
    update: bool  # with the moments of x behind them
    shift_mean: bool
    unbiased: bool
    eps: float
    eps_in: str  # one of EPS_PLACES of whiten
    clip: float  # infinity: not

    @property
    def whitening(self) -> WhitenCall:
        """What of it ``whiten`` has too."""
        return WhitenCall(self.x, self.mask, None, self.shift_mean, self.unbiased, self.eps, self.eps_in)


class RunningNormalizeResults(NamedTuple):
    normalized: Tensor
    state: Tensor  # [3] fp64
