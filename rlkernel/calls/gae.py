"""What a backend is asked for ``gae``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

HOLES = ("skip", "zero")


class GaeOutput(NamedTuple):
    """Per-token ``advantages`` and the value function's targets ``returns = advantages + values``; fp32 (fp64
    for fp64 input), 0 where the mask is not set.  Constants: they carry no gradient."""

    advantages: Tensor
    returns: Tensor


class GaeCall(NamedTuple):
    """Checked and normalised; of one dtype, rows dense, and padding a sequence of its own."""

    rewards: Tensor  # [B, L], or packed [N]
    values: Tensor
    mask: Tensor | None  # bool
    gamma: float
    lam: float | Tensor  # one value, or one for each sequence in fp64
    cu_seqlens: Tensor | None  # int64, [S + 1]
    last_values: Tensor | None  # one for each sequence
    holes: str  # one of HOLES


class GaeResults(NamedTuple):
    """Of the shape of ``rewards``, 0 where the mask is not set."""

    advantages: Tensor
    returns: Tensor
