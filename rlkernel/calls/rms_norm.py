"""What a backend is asked for ``rms_norm``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

ROUNDINGS = ("before_weight", "after_weight")


class RmsNormOutput(NamedTuple):
    """``normed`` [..., H], and ``summed`` [..., H], the rounded ``x + residual`` that was normed."""

    normed: Tensor
    summed: Tensor


class RmsNormCall(NamedTuple):
    """Checked and normalised: the last dimension is dense."""

    x: Tensor  # [..., H]
    residual: Tensor | None  # as x
    weight: Tensor | None  # [H]; fp64 only beside an x of fp64
    eps: float
    weight_offset: float
    rounding: str  # one of ROUNDINGS
    statistics: bool = True  # whether backward may follow
    needs: tuple[bool, ...] = (False,) * 3  # whether the gradients of x, residual and weight are wanted


class RmsNormResults(NamedTuple):
    """All dense; ``summed`` where there is a residual, whose rows are then those that backward reads;
    ``rstd`` where statistics are asked for."""

    normed: Tensor
    summed: Tensor | None
    rstd: Tensor | None  # [...]: 1 / sqrt(mean of squares + eps), fp32 (fp64 for fp64)


class RmsNormGrads(NamedTuple):
    """Of the results, in x's dtype."""

    normed: Tensor
    summed: Tensor | None
