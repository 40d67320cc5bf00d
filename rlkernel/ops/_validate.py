"""Checks shared by the public functions.  Each error names the argument, what it must be and what it got."""

import math

import torch
from torch import Tensor

from rlkernel import debug

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def floating(argument: str, tensor: Tensor, *, dim: str = "") -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{argument} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        want = "float16, bfloat16, float32 or float64"
        raise ValueError(f"{argument} must be {want}, got {name(tensor.dtype)}")


def same_device(argument: str, tensor: Tensor, other: str, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{argument} must be on {other}'s device {device}, got {tensor.device}")


def target_ids(ids: Tensor, shape: torch.Size, source: str, device: torch.device) -> Tensor:
    if not isinstance(ids, Tensor):
        raise ValueError(f"target_ids must be a tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"target_ids must be integers, got {name(ids.dtype)}")
    if ids.shape != shape:
        raise ValueError(f"target_ids must have the shape {tuple(shape)} of {source}, got {tuple(ids.shape)}")
    same_device("target_ids", ids, source.split(" ")[-1].split(".")[0], device)
    return ids.to(torch.int64)


def temperature(
    value: float | Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """A float, or one contiguous value per row in the dtype of the statistics."""
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"temperature must be a number or a tensor, got {type(value).__name__}")
        if not 0 < value < math.inf:  # traceable, unlike math.isfinite
            raise ValueError(f"temperature must be > 0 and finite, got {value}")
        return float(value)
    if value.dim() and value.shape != shape:
        want = f"one value or have shape {tuple(shape)}"
        raise ValueError(f"temperature must be {want}, got {tuple(value.shape)}")
    if value.requires_grad:
        raise ValueError("temperature must not require a gradient, got requires_grad=True")
    if value.dim():
        same_device("temperature", value, "target_ids", device)
    return value.to(device=device, dtype=torch.promote_types(dtype, torch.float32)).expand(shape).contiguous()


def values(ids: Tensor, vocab: int, temperature: float | Tensor, ignore_index: int) -> None:
    """Looks at the values themselves: always on a CPU, in debug mode on a GPU, where it synchronises."""
    if debug.may_read(ids) and ids.numel():
        low, high = ids.aminmax()
        if low < 0 or high >= vocab:
            bad = ((ids < 0) | (ids >= vocab)) & (ids != ignore_index)
            if bad.any():
                where = bad.nonzero()[0].tolist()
                value = ids[tuple(where)].item()
                raise ValueError(f"target_ids{where if where else ''} = {value} is outside [0, {vocab})")
    if isinstance(temperature, Tensor) and debug.may_read(temperature) and temperature.numel():
        bad = ~((temperature > 0) & temperature.isfinite())
        if bad.any():
            where = bad.nonzero()[0].tolist()
            value = temperature[tuple(where)].item()
            raise ValueError(f"temperature{where} must be > 0 and finite, got {value}")


def healthy(source: str, lse: Tensor) -> None:
    """In debug mode, raises for a row from which no distribution can be made."""
    if debug.enabled() and debug.may_read(lse):
        bad = ~lse.isfinite()
        if bad.any():
            where = bad.nonzero()[0].tolist()
            what = "is -inf everywhere" if lse[tuple(where)] == -torch.inf else "holds NaN or +inf"
            raise ValueError(f"{source}{where or ''} must give a finite log-sum-exp, but the row {what}")
