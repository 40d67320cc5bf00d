"""Which tensors Triton takes."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_VOCAB = 2**22  # the sums of lanes are integers: s <= V then fits int64


def device_reasons(tensor: Tensor) -> list[str]:
    if tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    return [f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {tensor.device}"]


def generation() -> int:
    """That of the NVIDIA GPU for which kernels are compiled; 0 of others and in the interpreter."""
    if torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    import triton

    return int(triton.runtime.driver.active.get_current_target().arch) // 10


def tensor_reasons(name: str, tensor: Tensor) -> list[str]:
    """The reasons that device and dtype give."""
    reasons = device_reasons(tensor)
    if tensor.dtype not in DTYPES:
        reasons.append(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
    return reasons


def taking(name: str) -> Callable[..., list[str]]:
    """``unsupported`` of an op that is known by its first tensor."""
    return lambda *tensors, **options: tensor_reasons(name, tensors[0])


def at_most_fp32(what: str, count: int = 1) -> Callable[..., list[str]]:
    """``unsupported`` of an op whose first ``count`` tensors may have any dtype but fp64."""

    def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
        reasons = device_reasons(tensors[0])
        if any(x.dtype == torch.float64 for x in tensors[:count]):
            reasons.append(f"{what} must be at most fp32, got float64")
        return reasons

    return unsupported


def dense_reasons(name: str, tensor: Tensor) -> list[str]:
    # of no elements: torch calls that contiguous, whatever its strides are
    if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel():
        return []
    return [f"{name} must be dense in the last dimension, got strides {tensor.stride()}"]


def vocabulary_reasons(size: int) -> list[str]:
    return [] if size <= MAX_VOCAB else [f"the vocabulary must be at most {MAX_VOCAB}, got {size}"]


def taking_logits(*tensors: Tensor, **options: Any) -> list[str]:
    """``unsupported`` of an op over rows of logits."""
    logits = tensors[0]
    reasons = tensor_reasons("logits", logits) + vocabulary_reasons(logits.shape[-1])
    return reasons + dense_reasons("logits", logits)


def processors(device: torch.device) -> int:
    """A grid has no more programs than run at a time: each takes tile after tile, in whatever order."""
    if device.type != "cuda":
        return 4
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
