"""What a backend is asked for ``layer_norm``, and what it answers."""

from typing import NamedTuple

from torch import Tensor


class LayerNormCall(NamedTuple):
    """Checked and normalised: the last dimension is dense."""

    x: Tensor  # [..., H]
    weight: Tensor | None  # [H]; fp64 only beside an x of fp64
    bias: Tensor | None  # [H], likewise
    eps: float
    statistics: bool = True  # whether backward may follow
    needs: tuple[bool, ...] = (False,) * 3  # whether the gradients of x, weight and bias are wanted


class LayerNormResults(NamedTuple):
    """All dense; the statistics, where they are asked for, are fp32 (fp64 for fp64)."""

    normed: Tensor  # [..., H]
    mean: Tensor | None  # [...]
    rstd: Tensor | None  # [...]: 1 / sqrt(variance + eps)


class LayerNormGrads(NamedTuple):
    """Of x, and of weight and bias where they are wanted; each in its dtype."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
