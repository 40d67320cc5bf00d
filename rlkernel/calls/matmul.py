"""What a backend is asked for ``matmul``, and what it answers."""

from typing import NamedTuple

import torch
from torch import Tensor


class MatmulCall(NamedTuple):
    """Checked and normalised: one batch dimension, any strides."""

    a: Tensor  # [B, M, K]
    b: Tensor  # [B, K, N], of a's dtype
    bias: Tensor | None  # [N]
    out_dtype: torch.dtype  # a's, or fp32
    segments: int = 1  # of K, a power of two: the leaves of the tree that a sum is
    grad_segments: int = 1  # of N, likewise, in the gradient of a
    needs: tuple[bool, ...] = (False, False, False)  # whether the gradients of a, b and bias are wanted


class MatmulResults(NamedTuple):
    out: Tensor  # [B, M, N], dense


class MatmulGrads(NamedTuple):
    """Of a, b and bias, each in its dtype."""

    a: Tensor | None = None
    b: Tensor | None = None
    bias: Tensor | None = None
