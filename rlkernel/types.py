"""Results of the public functions, and what ops hand to backends."""

from typing import NamedTuple, Protocol


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
