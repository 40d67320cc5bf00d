"""Which tensors Triton takes."""

import os

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def device_reasons(tensor: Tensor) -> list[str]:
    if tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    return [f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {tensor.device}"]


def refusals(what: str, *tensors: Tensor) -> list[str]:
    """Why no kernel runs on these tensors, which may have any dtype but fp64."""
    reasons = device_reasons(tensors[0])
    if any(x.dtype == torch.float64 for x in tensors):
        reasons.append(f"{what} must be at most fp32, got float64")
    return reasons


def tensor_reasons(name: str, tensor: Tensor) -> list[str]:
    """The reasons that device and dtype give."""
    reasons = device_reasons(tensor)
    if tensor.dtype not in DTYPES:
        reasons.append(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
    return reasons
