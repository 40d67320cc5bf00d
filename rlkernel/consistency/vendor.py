"""torch's own product on a GPU, where it has the bits of ours.

A vendor's library picks its kernel by what this file calls the kind of a call: shapes, strides, alignment
and settings; never by the numbers.  When a kind comes for the second time, both multiply numbers that show in
which order a sum is made.  Where all bits are the same, the library multiplies from then on.  So no bit shows
which calls it gets, in this process or in another one.

A comparison says nothing of kinds that it did not have, and only what its numbers tell apart: no proof.
Hence ``batch_invariant(vendor=True)``, which is off by default.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.consistency import bits
from rlkernel.runtime import gpu, invariance

DEVICES = ("cuda",)
KINDS = 10_000  # that are remembered
MOST = 2**27  # numbers of an operand, or a product, that are held a second time to compare
ROUNDS = 5  # of operands that are compared
LEAST_K = 32  # below it a sum has hardly an order to show
HUGE, SMALL = 2.0**15, 2.0**-14  # what is beside the former is lost, in fp32 and in the sums of tensor cores
ADDED = 128  # how many of the latter a sum has about, so that 16 bits hold their number
ALIGNED = 256  # bytes, of which a library looks at no more

_same: dict[Any, bool | None] = {}  # by the kind of a call; None where it came once


def product(a: Tensor, b: Tensor, ours: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    """``a @ b`` of two matrices by torch, or None where it is left to ``ours``."""
    if a.device.type not in DEVICES or (a.is_cuda and torch.cuda.tunable.is_enabled()):
        return None  # a tuner may change its mind
    kind = _kind(a, b)
    if kind not in _same:
        if len(_same) >= KINDS:
            _same.clear()
        _same[kind] = None
        return None
    if _same[kind] is None and not gpu.capturing(a.device):
        _same[kind] = _has_our_bits(a, b, ours)
    return multiply(a, b) if _same[kind] else None


def multiply(a: Tensor, b: Tensor) -> Tensor:
    with invariance.aside():
        return torch.mm(a, b)


def _kind(a: Tensor, b: Tensor) -> Any:
    cuda = torch.backends.cuda
    return (
        a.dtype, a.device, a.shape, a.stride(), b.shape, b.stride(),
        *(_aligned(x.data_ptr()) for x in (a, b)),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.preferred_blas_library(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )  # fmt: skip


def _aligned(address: int) -> int:
    return math.gcd(address, ALIGNED)


def _has_our_bits(a: Tensor, b: Tensor, ours: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """False too where the numbers would not have told a sum that is cut in two from one that is not."""
    (rows, inner), columns = a.shape, b.shape[1]
    too_large = max(rows * inner, inner * columns, rows * columns) > MOST
    overlap = any(n > 1 and step == 0 for x in (a, b) for n, step in zip(x.shape, x.stride(), strict=True))
    if too_large or overlap or inner < LEAST_K or min(rows, columns) == 0:
        return False
    half, seen = inner // 2, False
    try:
        for number in range(ROUNDS):
            with invariance.aside():
                x, y = _telling(a, b, number)
            want = ours(x, y)
            parts = ours(x[:, :half], y[:half]), ours(x[:, half:], y[half:])
            with invariance.aside():
                if bool(bits.differ(multiply(x, y), want).any()):
                    return False
                seen |= bool(bits.differ(parts[0] + parts[1], want).any())
    except torch.OutOfMemoryError:
        return False
    return seen


def _telling(a: Tensor, b: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Operands of this kind.

    Of a sum with two huge numbers that cancel, what is left are the small ones that are added behind both of
    them, or apart from them: which these are follows from the order (as in FPRev, USENIX ATC 2025).  Of a
    sum of which nothing should be left, what is left is how it was rounded.
    """
    generator = torch.Generator(a.device).manual_seed(number)
    x, y = _like(a), _like(b)
    if number == 0:
        for plain in (x, y):
            plain.copy_(torch.randn(plain.shape, generator=generator, dtype=torch.float32, device=a.device))
        half = a.shape[1] // 2  # which cancels the other
        x[:, half:] = 0
        x[:, half : 2 * half], y[half : 2 * half] = -x[:, :half], y[:half]
    else:
        marked, other = (x, y) if number % 2 == 0 else (y.t(), x)
        _mark(marked, generator)
        other.copy_(torch.rand(other.shape, generator=generator, dtype=torch.float32, device=a.device) < 0.75)
    return x, y


def _mark(x: Tensor, generator: torch.Generator) -> None:
    """Rows of small numbers, with two huge ones in each, anywhere."""
    count, inner = x.shape
    draw = torch.rand(count, inner, generator=generator, dtype=torch.float32, device=x.device)
    x.copy_((draw < min(0.5, ADDED / inner)) * SMALL)
    places = torch.rand(count, 2, generator=generator, dtype=torch.float32, device=x.device)
    first = (places[:, 0] * inner).long().clamp_(max=inner - 1)
    second = (first + 1 + (places[:, 1] * (inner - 1)).long().clamp_(max=inner - 2)) % inner
    x.scatter_(1, first[:, None], HUGE)
    x.scatter_(1, second[:, None], -HUGE)


def _like(x: Tensor) -> Tensor:
    """Memory of its shape, strides and alignment."""
    size, unit = x.dtype.itemsize, ALIGNED // x.dtype.itemsize
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    memory = x.new_zeros(span + unit)
    skipped = (x.data_ptr() - memory.data_ptr()) % ALIGNED // size
    return memory[skipped:].as_strided(x.shape, x.stride())
