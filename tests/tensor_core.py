"""What a tensor core of NVIDIA computes, bit for bit, for kernels that Triton's interpreter runs.

    with tensor_core.interpreted_as("sm_90"):
        rlkernel.matmul(a, b)           # on the backend triton

A tensor core adds a few products and the accumulator at a time. The products are exact; each summand is cut
off at a fixed number of bits below the largest exponent among them, their sum is exact, and it is cut off to
fp32, towards 0. So what is lost depends on which products meet in one addition. A model that rounds sums of
fp32 to nearest does not know that, and passes kernels whose bits differ on a GPU.

The numbers of products and of bits are those that MMA-Sim (arXiv 2511.10909) measured on GPUs, with operands
of 16 bits: mma.sync of sm_80; mma.sync, wgmma and tcgen05 of sm_90 and sm_100, which are alike. A ``tl.dot``
is a chain of these instructions in the order of K; one of fp32 in full precision is a chain of fused
multiply-adds.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import triton_interpreter


class Unit(NamedTuple):
    products: int  # that are added at a time
    bits: int  # that are kept below the largest exponent
    zero: int  # the exponent that a sum without any number other than 0 has


UNITS = {"sm_80": Unit(8, 24, -132), "sm_90": Unit(16, 25, -133), "sm_100": Unit(16, 25, -133)}
LEAST = {"fp16": -14, "bf16": -126, "fp32": -126}  # exponents of subnormal numbers
NOTHING = -(2**20)  # that of 0: it is never the largest


@contextlib.contextmanager
def interpreted_as(target: str) -> Iterator[None]:
    """``tl.dot`` is that of this GPU meanwhile."""
    before = triton_interpreter.multiply
    triton_interpreter.multiply = functools.partial(multiply, UNITS[target])
    try:
        yield
    finally:
        triton_interpreter.multiply = before


def multiply(
    unit: Unit, a: np.ndarray, b: np.ndarray, sums: np.ndarray, dtype: str, precision: str
) -> np.ndarray:
    """``sums + a @ b`` of numbers of this dtype, which are held in a wider one."""
    if dtype in ("fp16", "bf16"):
        return chain(unit, a, b, sums, LEAST[dtype])
    if (dtype, precision) == ("fp32", "IEEE"):
        return fused_chain(a, b, sums)
    raise NotImplementedError(f"no kernel of ours multiplies {dtype} in {precision}")


def chain(unit: Unit, a: np.ndarray, b: np.ndarray, sums: np.ndarray, least: int) -> np.ndarray:
    """Numbers and exponents are held apart from each other; fp64 holds all that happens to either exactly."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    high, low = exponents(a, least), exponents(b, least)
    finite = np.isfinite(a).all() and np.isfinite(b).all()
    for first in range(0, a.shape[-1], unit.products):
        here = range(first, min(first + unit.products, a.shape[-1]))
        wide = sums.astype(np.float64)
        top = np.maximum(exponents(wide, LEAST["fp32"]), unit.zero)
        for k in here:
            top = np.maximum(top, high[..., :, k, None] + low[..., None, k, :])
        scale = np.ldexp(1.0, unit.bits - top)
        total = np.trunc(wide * scale)
        for k in here:
            total += np.trunc(a[..., :, k, None] * b[..., None, k, :] * scale)
        sums = towards_zero(total / scale)
        if not (finite and np.isfinite(wide).all()):  # as IEEE has it, in any order
            plain = wide + sum(a[..., :, k, None] * b[..., None, k, :] for k in here)
            sums = np.where(np.isfinite(plain), sums, plain.astype(np.float32))
    return sums


def exponents(x: np.ndarray, least: int) -> np.ndarray:
    return np.where(x == 0, NOTHING, np.maximum(np.frexp(x)[1] - 1, least))


def towards_zero(x: np.ndarray) -> np.ndarray:
    """fp64 as fp32 without the digits that do not fit; too large a number is infinite, and a zero is +0."""
    near = np.where(np.abs(x) < 2.0**128, np.clip(x, *LARGEST), x).astype(np.float32)
    beyond = np.isfinite(near) & (np.abs(near.astype(np.float64)) > np.abs(x))
    return (near.view(np.int32) - beyond).view(np.float32) + np.float32(0)


LARGEST = np.finfo(np.float32).min.astype(np.float64), np.finfo(np.float32).max.astype(np.float64)


def fused_chain(a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """One fma for each element of K, in order."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for k in range(a.shape[-1]):
        sums = fma(a[..., :, k, None], b[..., None, k, :], sums.astype(np.float64))
    return sums


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Of fp32 held in fp64, which holds the product; its sum is rounded to odd there, and so once in all."""
    product = x * y
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    bits = np.ascontiguousarray(total).view(np.int64)
    outwards = np.where((lost > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + outwards, bits).view(np.float64).astype(np.float32)
