"""Numbers and ids as sampling takes them: one for all rows or one for each, checked as kernels have them."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.ops import _scalars, _validate
from rlkernel.ops._validate import Range

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Rows(NamedTuple):
    """The rows that arguments are for."""

    shape: torch.Size
    vocab: int
    dtype: torch.dtype  # of the logits
    device: torch.device

    @property
    def total(self) -> int:
        return math.prod(self.shape)


def whole(argument: str, value: Any, low: float, high: float, want: str) -> int:
    """An integer, of Python, NumPy or another library."""
    number = _scalars.as_int(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{argument} must be {want}, got {value!r}")
    return number


def int64(argument: str, value: Any) -> Any:
    """64-bit words; those of uint64, and of numbers below 2**64, keep their bits."""
    if not isinstance(value, Tensor):
        number = whole(argument, value, -(2**63), 2**64 - 1, "a 64-bit integer or a tensor")
        return number if number < 2**63 else number - 2**64
    if value.dtype == torch.uint64:
        return value.view(torch.int64)
    return integers(argument, value)


def integers(argument: str, value: Tensor) -> Tensor:
    if value.dtype not in INTEGERS:
        raise ValueError(f"{argument} must be integers, got {_validate.name(value.dtype)}")
    return value


def one(argument: str, value: Any, dtype: torch.dtype) -> float:
    """In ``dtype``, in which a kernel has it: only what is left of a number may be in range or not."""
    if not _scalars.is_number(value):
        raise ValueError(f"{argument} must be a number or a tensor, got {type(value).__name__}")
    return _scalars.rounded(value, dtype)


def each(argument: str, value: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Likewise of a tensor, whose values are not looked at."""
    if value.dtype == torch.bool or value.is_complex():
        raise ValueError(f"{argument} must be numbers, got {_validate.name(value.dtype)}")
    _validate.without_gradient(argument, value)
    return per_row(argument, value.detach() if value.requires_grad else value, rows, dtype)


def within(
    range: Range, argument: str, value: float | Tensor, rows: Rows, dtype: torch.dtype = torch.float32
) -> float | Tensor:
    """One number of the range, or one for each row."""
    if isinstance(value, Tensor):
        value = each(argument, value, rows, dtype)
        _validate.look(argument, value, range.holds, range.want)
        return value
    single = one(argument, value, dtype)
    if not range.holds(single):
        raise ValueError(f"{argument} must be {range.want}, got {value}")
    return single


def per_row(argument: str, value: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    if value.dim() and value.shape != rows.shape:
        want = f"one value or have shape {tuple(rows.shape)}"
        raise ValueError(f"{argument} must be {want}, got {tuple(value.shape)}")
    if value.dim() or value.is_meta:  # one value may be of any device, but there it is none
        _validate.same_device(argument, value, "logits", rows.device)
        if value.dim() == 1:
            return _validate.dense(value, dtype)
    return value.to(rows.device).expand(rows.shape).reshape(-1).to(dtype).contiguous()


def of_width(argument: str, ids: Any, rows: Rows, *, any_integer: bool = False) -> int:
    """K of ids that are [K], the same for all rows, or [..., K]."""
    integer_tensor(argument, ids, any_integer=any_integer)
    if ids.dim() == 0 or not _validate.among(ids.shape[:-1], (), rows.shape):
        want = f"[K] or {(*rows.shape, 'K')}".replace("'", "")
        raise ValueError(f"{argument} must have shape {want}, got {tuple(ids.shape)}")
    width: int = ids.shape[-1]
    return width


def integer_tensor(argument: str, ids: Any, *, any_integer: bool = False) -> None:
    known, want = (INTEGERS, "integer") if any_integer else (INTEGERS[:2], "int32 or int64")
    if not isinstance(ids, Tensor) or ids.dtype not in known:
        got = _validate.name(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{argument} must be an {want} tensor, got {got}")


def described(x: Any) -> str:
    """What an error says that it got."""
    if isinstance(x, Tensor):
        return f"{_validate.name(x.dtype)} {tuple(x.shape)}"
    return "None" if x is None else type(x).__name__
