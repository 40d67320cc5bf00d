"""Rows as the kernels of norms take them."""

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def rows_of(x: T) -> T:
    """``x`` [..., H] with a dense last dimension and at most two strides between rows; None stays None."""
    if x is None or x.is_contiguous():
        return x
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return x.contiguous()
    # a view where its first dimensions are one behind the other, else a copy
    return x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])


def dense_like(x: Tensor) -> Tensor:
    """An empty tensor of its shape, dtype and device: named one by one they take twice the time."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
