"""What a backend is asked for ``value_loss``, and what it answers."""

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLossOutput(NamedTuple):
    """``loss`` [] is differentiable; ``metrics`` [9], of the same pass, are named by ``VALUE_METRICS``."""

    loss: Tensor
    metrics: Tensor


# over the tokens that the mask keeps; variances divide by their number
VALUE_METRICS = (
    "tokens",
    "nonfinite",  # tokens whose loss is NaN or infinite
    "clip_fraction",  # of tokens where the clipped loss is the larger one
    "value_mean",
    "return_mean",
    "return_variance",
    "error_mean",  # of return - value
    "error_variance",
    "explained_variance",  # 1 - error_variance / return_variance, NaN where all returns are equal
)


class ValueLossCall(NamedTuple):
    """Checked and normalised.

    The loss is the sum of units * factor / num_items.  A unit is a ``"token"``, a sequence's ``"sum"`` or its
    ``"mean"``; num_items counts them, None those of this call.  A sequence without a token is none.
    """

    values: Tensor  # [B, L], or packed [N]
    returns: Tensor  # as values: of their dtype, or fp32
    mask: Tensor  # as values, bool
    old_values: Tensor | None  # as returns
    cu_seqlens: Tensor | None  # [S + 1] int32 or int64, of packed values
    num_items: float | Tensor | None
    cliprange: float
    huber_delta: float | None  # None: the squared error
    unit: str
    factor: float
    dtype: torch.dtype  # of the values, and so of their gradient
    slopes: bool = True  # whether backward may follow


class ValueLossResults(NamedTuple):
    """The gradient of ``values`` is ``slope * scale[sequence]``.

    ``slope`` is that of each token's own loss, 0 under the mask, None unless asked for; ``scale`` [sequences]
    is what the aggregation makes of it.
    """

    loss: Tensor
    metrics: Tensor
    slope: Tensor | None
    scale: Tensor
