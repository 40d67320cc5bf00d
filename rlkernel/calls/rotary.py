"""What a backend is asked for ``rotary``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

ROUNDINGS = ("before_sum", "after_sum")


class RotaryOutput(NamedTuple):
    """Of the shapes and dtypes of what was given; ``k`` is None where none was."""

    q: Tensor
    k: Tensor | None


class RotaryCall(NamedTuple):
    """Checked and normalised: of q and k the last dimension is dense."""

    q: Tensor  # [*tokens, D] and the heads at a dimension of their own
    k: Tensor | None  # as q, of other heads
    cos: Tensor  # [*tokens, W], or [P, W] with positions; W is rotary_dim or half of it
    sin: Tensor  # as cos
    positions: Tensor | None  # [*tokens] int64, dense: rows of cos and sin
    heads: int  # the dimension of the heads
    rotary_dim: int  # of each head the first, which turn
    interleaved: bool  # pairs are neighbours; else half of rotary_dim apart
    rounding: str  # one of ROUNDINGS
    inplace: bool = False  # q and k are written over, and are the results
    needs: tuple[bool, ...] = (False,) * 2  # whether the gradients of q and k are wanted


class RotaryResults(NamedTuple):
    q: Tensor
    k: Tensor | None


class RotaryGrads(NamedTuple):
    """Of q and k as they were given, or as they came out; None where there is none."""

    q: Tensor | None
    k: Tensor | None
