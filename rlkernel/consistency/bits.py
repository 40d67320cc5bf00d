"""Floats as integers: the same bits or not, and how many representable numbers lie between two."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST = torch.iinfo(torch.int64).max


def as_integers(x: Tensor) -> Tensor:
    """The bits of floats, as int64."""
    return x.detach().view(_INTEGERS[x.itemsize]).to(torch.int64)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many steps to the next number lead from ``a`` to ``b``, of one dtype: 0 also from -0 to 0.

    What does not fit into an int64, which only fp64 can have, is the largest one.
    """
    x, y = _ordered(a), _ordered(b)
    across = x.abs() + y.abs()  # around 0: the sum of two ways, which may wrap
    across = torch.where(across < 0, _MOST, across)
    return torch.where((x < 0) != (y < 0), across, (x - y).abs())


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the floats, both zeros 0."""
    bits = as_integers(x)
    magnitude = bits & (_MOST >> (64 - 8 * x.itemsize))
    return torch.where(bits < 0, -magnitude, magnitude)


def bit_lengths(x: Tensor) -> Tensor:
    """Of each integer >= 0 the number of its binary digits: 0 for 0, 1 for 1, 2 for 2 and 3, up to 63."""
    high, low = x >> 31, x & 0x7FFFFFFF  # in two halves, each of which a float holds exactly
    upper = torch.frexp(high.double()).exponent + 31
    return torch.where(high > 0, upper, torch.frexp(low.double()).exponent).to(torch.int64)


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one dtype and shape have other bits.  All NaNs are alike; -0 is not 0."""
    if a.is_complex():
        return differ(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())).any(-1)
    if not a.is_floating_point():
        return a != b
    return (as_integers(a) != as_integers(b)) & ~(a.isnan() & b.isnan())
