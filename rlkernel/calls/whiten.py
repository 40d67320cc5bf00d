"""What a backend is asked for ``whiten``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

EPS_PLACES = ("variance", "std")


class WhitenCall(NamedTuple):
    """Checked and normalised; all dense."""

    x: Tensor  # [...]
    mask: Tensor | None  # bool
    weights: Tensor | None
    shift_mean: bool
    unbiased: bool
    eps: float
    eps_in: str  # one of EPS_PLACES


class WhitenResults(NamedTuple):
    whitened: Tensor
