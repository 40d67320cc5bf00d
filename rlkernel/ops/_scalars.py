"""Numbers as arguments: Python's, NumPy's and others, and what they are in the precision of the kernels."""

import math
import numbers
import operator
from typing import Any

import torch

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
FP32_TINY = 2.0**-126


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)


def rounded(value: Any, dtype: torch.dtype) -> float:
    """A number in the precision of ``dtype``, fp64 or fp32, as kernels receive it."""
    try:
        x = float(value)
    except OverflowError:
        x = math.inf if value > 0 else -math.inf
    return x if dtype == torch.float64 else fp32(x)


def as_int(value: Any) -> int | None:
    """``value`` as an integer; None for what is none, bools among them."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return operator.index(value) if isinstance(value, numbers.Integral) else None


def fp32(x: float) -> float:
    """``x`` rounded to fp32, by plain arithmetic, which torch.compile can trace."""
    if not abs(x) < math.inf:
        return x
    if abs(x) < FP32_TINY:  # fp32 has multiples of 2**-149 here: so has fp64 about 2**-97
        shift = 1.5 * 2.0**-97
        return (x + shift) - shift
    # Veltkamp's splitting (Dekker 1971): of 53 bits 24 stay; NaN where it overflows
    shifted = x * (2.0**29 + 1.0)
    rounded = shifted - (shifted - x)
    return rounded if abs(rounded) <= FP32_MAX else math.copysign(math.inf, x)
