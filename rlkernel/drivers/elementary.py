"""exp and log in fp64 of operations that round every element alike.

torch's own kernels compute the last elements of a tensor by another function than the others, so that a bit
of a row may depend on the rows behind it.  ``rlkernel.batch_invariant`` refuses them in fp64 for that.
"""

import math

import torch
from torch import Tensor

LN2_HIGH, LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # times any exponent, the first is exact
EXP_TERMS, LOG_TERMS = 14, 13  # below half a unit in the last place of 1 on the reduced arguments


def exp(x: Tensor) -> Tensor:
    """Within a few units in the last place; 0 below -700."""
    y = x.clamp(-700, 700)
    n = (y * (1 / math.log(2))).round()
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    series = torch.full_like(r, 1 / math.factorial(EXP_TERMS - 1))
    for k in range(EXP_TERMS - 2, -1, -1):
        series = series * r + 1 / math.factorial(k)
    found = series * ((n.long() + 1023) << 52).view(torch.float64)
    return torch.where(x < -700, 0.0, torch.where(x == torch.inf, torch.inf, found))


def log(x: Tensor) -> Tensor:
    """Within a few units in the last place, of normal numbers and 0."""
    bits = x.contiguous().view(torch.int64)
    mantissa = ((bits & (2**52 - 1)) | (1023 << 52)).view(torch.float64)  # [1, 2)
    large = mantissa > math.sqrt(2)
    mantissa = torch.where(large, mantissa * 0.5, mantissa)
    exponent = (((bits >> 52) & 2047) - 1023 + large).double()
    f = (mantissa - 1) / (mantissa + 1)
    square = f * f
    series = torch.full_like(f, 1 / (2 * LOG_TERMS - 1))
    for k in range(LOG_TERMS - 2, -1, -1):
        series = series * square + 1 / (2 * k + 1)
    found = exponent * LN2_HIGH + (2 * f * series + exponent * LN2_LOW)
    found = torch.where(x == 0, -torch.inf, torch.where(x == torch.inf, torch.inf, found))
    return torch.where(x.isnan() | (x < 0), torch.nan, found)
