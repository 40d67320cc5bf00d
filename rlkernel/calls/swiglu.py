"""What a backend is asked for ``swiglu``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ROUNDINGS = ("before_product", "after_product")


class SwigluCall(NamedTuple):
    """Checked and normalised: the last dimension is dense."""

    gate: Tensor  # [..., I]; packed: [..., 2 I], the gate and behind it up
    up: Tensor | None  # as gate; None: packed, or 1 everywhere
    activation: str  # one of ACTIVATIONS
    rounding: str  # one of ROUNDINGS
    packed: bool = False
    needs: tuple[bool, ...] = (False,) * 2  # whether the gradients of gate and up are wanted


class SwigluResults(NamedTuple):
    product: Tensor  # [..., I], dense


class SwigluGrads(NamedTuple):
    """Of gate, which is packed as it is, and of up; each where it is wanted."""

    gate: Tensor | None
    up: Tensor | None


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a packed tensor: of the gate, and of up."""
    length = x.shape[-1] // 2
    return x.narrow(-1, 0, length), x.narrow(-1, length, length)
