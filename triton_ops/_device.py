"""Which tensors Triton takes."""

import os

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def device_reasons(tensor: Tensor) -> list[str]:
    if tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    return [f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {tensor.device}"]
