"""What a backend is asked for ``prefix_shared_attention``, and what it answers."""

from typing import NamedTuple, Protocol

from torch import Tensor

from rlkernel.prefix.layout import PrefixLayout

PARITIES = ("fast", "bitwise")


class Forest(Protocol):
    """Segments of rows, one behind the other: how long each is, and below which one it stands (-1: none).

    A row sees the rows of its segment up to itself and all rows of the segments above.
    """

    @property
    def lengths(self) -> tuple[int, ...]: ...

    @property
    def parents(self) -> tuple[int, ...]: ...


class AttentionRule(NamedTuple):
    """What an attention score goes through, checked and normalised."""

    scale: float  # s = scale * q . k
    softcap: float  # then softcap * tanh(s / softcap); 0: not
    window: int  # keys at most this many positions back, the row itself included; 0: all
    bitwise: bool  # the bits of the same backend on the repeated prompts


class AttentionCall(NamedTuple):
    """Checked; the last dimension of q, k and v is dense."""

    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, Dv]
    layout: PrefixLayout
    rule: AttentionRule
    sinks: Tensor | None = None  # [Hq]
    needs: tuple[bool, ...] = (False,) * 4  # whether the gradients of q, k, v and sinks are wanted


class AttentionResults(NamedTuple):
    """``lse`` is the whole row's, the sinks included, and has no gradient."""

    out: Tensor  # [T, Hq, Dv]
    lse: Tensor  # [Hq, T] fp32 or fp64


class OutGrads(NamedTuple):
    """The upstream gradient, with any strides."""

    out: Tensor  # [T, Hq, Dv]


class AttentionGrads(NamedTuple):
    """Of q, k and v; that of the sinks follows from the results."""

    q: Tensor
    k: Tensor
    v: Tensor
