"""The bit model of tensor cores against its definition in whole numbers, and what is known of single sums."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from backends import needs_interpreter
from matmul_cases import probe

pytest.importorskip("triton", reason="Triton is not installed")

import tensor_core  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import triton_interpreter  # noqa: E402

import rlkernel  # noqa: E402

ON_EVERY_GPU = pytest.mark.parametrize("target", tensor_core.UNITS)
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def exponent(x, least):
    """Of the largest power of two in a Fraction that is not 0, or the least that its dtype has."""
    found = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return max(found - (abs(x) < Fraction(2) ** found), least)


def cut(x, unit):
    """Towards 0, to a multiple of a power of two."""
    return int(x / Fraction(2) ** unit) * Fraction(2) ** unit


def defined(unit, row, column, total, least):
    """One output, in fractions of whole numbers."""
    for first in range(0, len(row), unit.products):
        pairs = [(x, y) for x, y in zip(row, column, strict=True)][first : first + unit.products]
        summands = [(x * y, exponent(x, least) + exponent(y, least)) for x, y in pairs if x * y]
        summands += [(total, exponent(total, -126))] if total else []
        last = max([unit.zero, *(e for _, e in summands)]) - unit.bits
        exact = sum((cut(x, last) for x, _ in summands), Fraction(0))
        total = cut(exact, exponent(exact, -126) - 23) if exact else exact
    return total


def draw(shape, sizes, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    zero = torch.rand(*shape, generator=g) < 0.1
    return (x * 2.0 ** torch.randint(*sizes, shape, generator=g)).masked_fill(zero, 0).to(HALVES[dtype])


# of one size, of many, that cancel, and subnormal in each dtype and in the sum
@pytest.mark.parametrize("sizes", [(0, 1), (-14, 13), (-24, -9), (-75, -55)], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@ON_EVERY_GPU
def test_the_model_is_its_definition(target, dtype, sizes):
    a, b = draw((4, 40), sizes, dtype, 1), draw((40, 5), sizes, dtype, 2)
    a[3, 20:], b[20:] = -a[3, :20], b[:20]  # a row of which nothing is left but what was cut off
    start = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)) * 2.0 ** sizes[0]
    unit, least = tensor_core.UNITS[target], tensor_core.LEAST[dtype]
    got = tensor_core.multiply(unit, a.float().numpy(), b.float().numpy(), start.numpy(), dtype, "IEEE")
    rows, columns = ([[Fraction(x) for x in line] for line in y.tolist()] for y in (a, b.T))
    for i, j in np.ndindex(4, 5):
        assert Fraction(float(got[i, j])) == defined(
            unit, rows[i], columns[j], Fraction(start[i, j].item()), least
        )


def dot(target, row, column, total=0.0, dtype="bf16"):
    a, b = np.array([row], np.float32), np.array([column], np.float32).T
    with np.errstate(invalid="ignore", over="ignore"):
        unit = tensor_core.UNITS[target]
        return float(tensor_core.multiply(unit, a, b, np.array([[total]], np.float32), dtype, "IEEE")[0, 0])


def test_what_is_known_of_single_sums():
    """What sm_80 loses 25 bits below the largest exponent sm_90 keeps, and loses one bit below."""
    big, ones = [2.0**12, -(2.0**12)], [2.0**12, 2.0**12]
    for bits, kept in ((24, {"sm_80", "sm_90", "sm_100"}), (25, {"sm_90", "sm_100"}), (26, set())):
        found = {gpu for gpu in tensor_core.UNITS if dot(gpu, [*big, 1.0], [*ones, 2.0 ** (24 - bits)])}
        assert found == kept
    nine = [1.0] + [0.0] * 7 + [2.0**-24]  # the ninth product is a sum of its own on sm_80
    assert dot("sm_80", nine, nine, -1.0) == 2.0**-48 and dot("sm_90", nine, nine, -1.0) == 0
    assert dot("sm_90", [1.0, 1.0], [1.0, 2.0**-23], 2.0) == 3.0  # towards 0, not to nearest
    assert dot("sm_90", [-1.0, -1.0], [1.0, 2.0**-23], -2.0) == -3.0
    assert str(dot("sm_90", [-0.0], [1.0], -0.0)) == "0.0"
    most = 2.0**64
    assert dot("sm_90", [most], [most]) == np.inf and dot("sm_90", [most, most], [most, -most]) == 0
    assert dot("sm_90", [most, -1.0], [most, 1.0]) == np.inf


@pytest.mark.parametrize(
    "row, column, total, want",
    [
        ([np.inf, 1.0], [1.0, 1.0], 0.0, np.inf),
        ([np.inf, 1.0], [0.0, 1.0], 0.0, np.nan),
        ([np.inf, np.inf], [1.0, -1.0], 0.0, np.nan),
        ([1.0], [1.0], -np.inf, -np.inf),
        ([np.inf], [1.0], -np.inf, np.nan),
        ([0.0], [np.nan], 0.0, np.nan),
    ],
)
def test_what_is_not_finite(row, column, total, want):
    assert np.array_equal(dot("sm_90", row, column, total), want, equal_nan=True)


def test_fp32_is_a_chain_of_fused_multiply_adds():
    g = np.random.default_rng(0)
    x, y, z = (g.standard_normal(4000).astype(np.float32).astype(np.float64) for _ in range(3))
    z *= 2.0 ** g.integers(-60, 20, 4000)
    z[:2000] = -np.float32(x[:2000] * y[:2000])  # which cancels
    got = tensor_core.fma(x, y, z)
    for one in range(4000):
        exact = Fraction(x[one]) * Fraction(y[one]) + Fraction(z[one])
        near = [np.nextafter(got[one], np.float32(to)) for to in (-np.inf, got[one], np.inf)]
        errors = [abs(Fraction(float(v)) - exact) for v in near]
        assert errors[1] == min(errors)
    half = 1 + 2.0**-24  # between two numbers, which fp64 would take for the middle if it rounded to nearest
    assert tensor_core.fma(np.float64([half]), np.float64([1.0]), np.float64([2.0**-80]))[0] > 1


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@needs_interpreter
@pytest.mark.parametrize("dtype", HALVES)
@ON_EVERY_GPU
def test_kernels_multiply_as_the_gpu_that_is_named(target, dtype):
    a, b = draw((16, 32), (-14, 13), dtype, 1), draw((32, 16), (-14, 13), dtype, 2)
    outs = torch.empty(3, 16, 16)
    dot_kernel[(1,)](a, b, outs[0], M=16, N=16, K=32)
    with pytest.raises(ZeroDivisionError), tensor_core.interpreted_as(target):
        dot_kernel[(1,)](a, b, outs[1], M=16, N=16, K=32)
        raise ZeroDivisionError
    dot_kernel[(1,)](a, b, outs[2], M=16, N=16, K=32)
    unit = tensor_core.UNITS[target]
    want = tensor_core.multiply(
        unit, a.float().numpy(), b.float().numpy(), np.zeros((16, 16), np.float32), dtype, "IEEE"
    )
    assert torch.equal(outs[1], torch.from_numpy(want)) and not torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2]) and triton_interpreter.multiply is triton_interpreter.dot_in_order


@needs_interpreter
def test_tf32_is_not_taken_for_fp32():
    """Which no kernel of ours uses."""
    with (
        tensor_core.interpreted_as("sm_90"),
        pytest.raises(Exception, match="no kernel of ours .* fp32 in TF32"),
    ):
        dot_kernel[(1,)](torch.ones(16, 16), torch.ones(16, 16), torch.empty(16, 16), M=16, N=16, K=16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("rows", [1, 64, 129])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gpu_that_is_here_adds_as_the_model_has_it(dtype, rows):
    """In every kind of tile; what this cannot show on a CPU is that the model is right."""
    major, minor = torch.cuda.get_device_capability()
    target = torch.version.hip or f"sm_{major}{minor}"
    if target not in tensor_core.UNITS:
        pytest.skip(f"the model of tensor cores has no {target}")
    a, weight = probe(rows, 136, 1, HALVES[dtype]), probe(72, 136, 2, HALVES[dtype])
    with rlkernel.use_backend("triton"):
        got = rlkernel.matmul(a.cuda(), weight.cuda().t(), out_dtype=torch.float32).cpu()
    operands = a.float().numpy(), weight.float().t().numpy(), np.zeros((rows, 72), np.float32)
    want = tensor_core.multiply(tensor_core.UNITS[target], *operands, dtype, "IEEE")
    assert torch.equal(got, torch.from_numpy(want))
