"""What the attention kernels of FlashInfer take."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from rlkernel.drivers.sampling import imported

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # what its kernels are compiled for, with values as wide as keys
WORKSPACE = 128 * 2**20  # bytes; what its documentation recommends


def tensor_reasons(name: str, x: Tensor) -> list[str]:
    reasons = []
    if x.device.type != "cuda" or torch.version.hip is not None:
        reasons.append(f"{name} must be on an NVIDIA GPU, got {x.device}")
    if x.dtype not in DTYPES:
        reasons.append(f"{name} must be float16 or bfloat16, got {str(x.dtype).removeprefix('torch.')}")
    return reasons


def natural(out: Tensor, lse2: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Its results with sinks, and lse [T, Hq] of base 2 as [Hq, T] of the natural base."""
    lse = lse2.T * math.log(2)
    if sinks is None:
        return out, lse.contiguous()
    total = torch.logaddexp(lse, sinks.float()[:, None])
    return (out * torch.exp(lse - total).T[..., None]).to(out.dtype), total.contiguous()


library = functools.partial(imported, "flashinfer")
