"""Tensor descriptors: tiles of which tensors they copy."""

from torch import Tensor


def aligned(x: Tensor) -> bool:
    """Dense rows that begin at multiples of 16 bytes and do not overlap."""
    stride, dense = x.stride()
    unit = 16 // x.dtype.itemsize
    return dense == 1 and stride % unit == 0 and stride >= x.shape[1] and x.data_ptr() % 16 == 0
