"""Tensor descriptors: which GPUs copy tiles of a tensor by them, and of which tensors."""

import os

import torch
import triton
from torch import Tensor


def generation() -> int:
    """That of the NVIDIA GPU for which kernels are compiled; 0 of others and in the interpreter."""
    if torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch) // 10


def aligned(x: Tensor) -> bool:
    """Dense rows that begin at multiples of 16 bytes and do not overlap."""
    stride, dense = x.stride()
    unit = 16 // x.dtype.itemsize
    return dense == 1 and stride % unit == 0 and stride >= x.shape[1] and x.data_ptr() % 16 == 0
