"""Elementary functions with the bits that csrc/include/rlkernel/math.cuh has on every device.

Kernels that use them are compiled with ``enable_fp_fusion=False``: a multiplication is fused with an addition
where this says ``fma``, and nowhere else.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.44269504)
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
ROOT_HALF = tl.constexpr(0x3F3504F3)  # bits of sqrt(1 / 2)
MANTISSA = tl.constexpr(0x007FFFFF)


@triton.jit
def max_or_nan(a, b):
    """The larger; NaN where either is NaN."""
    return tl.where((a >= b) | (a != a), a, b)


@triton.jit
def expm1_small(x):
    """exp(x) - 1 for |x| <= ln(2) / 2."""
    p = tl.full(x.shape, 1.991993e-4, tl.float32)
    p = tl.fma(p, x, 1.3945091e-3)
    p = tl.fma(p, x, 8.3332649e-3)
    p = tl.fma(p, x, 4.1666303e-2)
    p = tl.fma(p, x, 1.6666667e-1)
    p = tl.fma(p, x, 0.5)
    return tl.fma(p * x, x, x)


@triton.jit
def exp_exact(x):
    """exp(x) within 1 ulp, of x in [-87, 88]; beyond, of the nearer end."""
    x = tl.where(x < -87.0, -87.0, tl.where(x > 88.0, 88.0, x))
    n = (x * LOG2E + TO_INTEGER) - TO_INTEGER
    r = tl.fma(n, tl.full(x.shape, -0.693359375, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, 2.12194440e-4, tl.float32), r)
    y = 1.0 + expm1_small(r)
    return y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def expm1_unbounded(x):
    """exp(x) - 1 within 2 ulp, which keeps its digits as x -> 0, and is infinite where exp(x) is."""
    half = exp_exact(x * 0.5)
    large = tl.where(x > 89.0, float("inf"), half * half)
    return tl.where(tl.abs(x) <= 0.346, expm1_small(x), tl.where(x > 80.0, large, exp_exact(x) - 1.0))


@triton.jit
def log_exact(x):
    """log(x) within 1 ulp for normal x > 0; -inf at 0, and x itself where it is NaN, infinite or below 0."""
    bits = x.to(tl.int32, bitcast=True) - ROOT_HALF  # x = 2^n * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
    n = (bits >> 23).to(tl.float32)
    f = ((bits & MANTISSA) + ROOT_HALF).to(tl.float32, bitcast=True) - 1.0
    p = tl.full(x.shape, 6.91799596e-2, tl.float32)
    p = tl.fma(p, f, -1.17796749e-1)
    p = tl.fma(p, f, 1.18660346e-1)
    p = tl.fma(p, f, -1.23857968e-1)
    p = tl.fma(p, f, 1.42199188e-1)
    p = tl.fma(p, f, -1.66691974e-1)
    p = tl.fma(p, f, 2.00021520e-1)
    p = tl.fma(p, f, -2.49999866e-1)
    p = tl.fma(p, f, 3.33333105e-1)
    tail = f * f * (f * p)
    tail = tl.fma(n, tl.full(x.shape, -2.12194440e-4, tl.float32), tail)
    tail = tl.fma(f * f, tl.full(x.shape, -0.5, tl.float32), tail)
    found = tl.fma(n, tl.full(x.shape, 0.693359375, tl.float32), f + tail)
    special = tl.where(x == 0.0, float("-inf"), x)
    return tl.where((x > 0.0) & (x < float("inf")), found, special)
