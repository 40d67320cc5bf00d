"""The Triton kernels of ``swiglu``: a program takes a block of a row; no element sees another.

Each operation is rounded as IEEE says, in the order of csrc/include/rlkernel/swiglu/terms.h: an element has
the bits that the compiled kernels give it.
"""

import triton
import triton.language as tl

from rlkernel.calls.swiglu import ACTIVATIONS
from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops.rms_norm_kernels import start_of

Activation = Names(ACTIVATIONS)

jit = triton.jit(
    do_not_specialize=[
        f"{name}_{part}" for name in ("gate", "up", "grad", "out", "more") for part in ("inner", "outer")
    ]
)


@triton.jit
def exp_of(x):
    """exp(x); infinite above the range of fp32, 0 below that of normal numbers, NaN at NaN."""
    x = tl.where(x > 89.0, 89.0, x)
    x = tl.where(x < -87.5, -87.5, x)
    magic = 12582912.0 + 126.0  # 1.5 * 2^23: adding it rounds to an integer in the low bits
    shifted = tl.fma(x, tl.full(x.shape, 1.44269504, tl.float32), tl.full(x.shape, magic, tl.float32))
    n = shifted - magic
    r = tl.fma(n, tl.full(x.shape, -0.693359375, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, 2.12194440e-4, tl.float32), r)
    p = tl.full(x.shape, 1.991993e-4, tl.float32)
    p = tl.fma(p, r, 1.3945091e-3)
    p = tl.fma(p, r, 8.3332649e-3)
    p = tl.fma(p, r, 4.1666303e-2)
    p = tl.fma(p, r, 1.6666667e-1)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p * r, r, r) + 1.0
    # n + 126 as a biased exponent is 2^(n - 1), for n reaches 128
    half = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return p * half * 2.0


@triton.jit
def sigmoid_gated(x, z, slope_of_z):
    """x / (1 + exp(-z)) and its slope."""
    e = exp_of(-z)
    whole = 1.0 + e
    s = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), whole)
    rest = tl.where(z > 0, e * s, 1.0 - s)
    return tl.div_rn(x, whole), s * (1.0 + (x * rest) * slope_of_z)


@triton.jit
def gelu(x):
    """max(x, 0) - t Q(t) with t = |x| and the tail Q of the normal distribution, and its slope."""
    t = tl.where(x > 0, x, -x)
    t = tl.where(t > 13.5, 13.5, t)
    w = exp_of(-0.5 * (t * t))
    one = tl.full(x.shape, 1.0, tl.float32)
    v = tl.div_rn(one, tl.fma(t, tl.full(x.shape, 0.35, tl.float32), one))
    p = tl.full(x.shape, -0.0291269943, tl.float32)
    p = tl.fma(p, v, 0.143877581)
    p = tl.fma(p, v, -0.255515218)
    p = tl.fma(p, v, 0.158940971)
    p = tl.fma(p, v, -0.0229447745)
    p = tl.fma(p, v, 0.105435975)
    p = tl.fma(p, v, 0.119851723)
    p = tl.fma(p, v, 0.13985917)
    p = tl.fma(p, v, 0.139621571)
    tail = w * (p * v)
    density = tl.where(x > 0, t, -t) * (w * 0.398942280)
    return tl.where(x > 0, x, 0.0) - t * tail, tl.where(x > 0, 1.0 - tail, tail) + density


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activated x, and the slope there."""
    if ACTIVATION == Activation.silu:
        value, slope = sigmoid_gated(x, x, 1.0)
    elif ACTIVATION == Activation.gelu:
        value, slope = gelu(x)
    else:
        square = x * x
        few = tl.where(square > 100.0, 100.0, square)  # beyond it the slope is 0 or 1, and not 0 * infinity
        scale = tl.full(x.shape, 1.59576912, tl.float32)
        z = x * tl.fma(square, tl.full(x.shape, 0.0713548163, tl.float32), scale)
        value, slope = sigmoid_gated(x, z, tl.fma(few, tl.full(x.shape, 0.214064449, tl.float32), scale))
    return value, slope


@triton.jit
def part_of(rows, inner, outer, step, row, i, there):
    """Elements of a row as floats, 1 each where there are no rows."""
    if rows is None:
        found = tl.full(i.shape, 1.0, tl.float32)
    else:
        found = tl.load(rows + start_of(row, inner, outer, step) + i, mask=there, other=0.0).to(tl.float32)
    return found


@jit
def swiglu_forward_kernel(
    gate, gate_inner: tl.int64, gate_outer: tl.int64, gate_step: tl.int64,
    up, up_inner: tl.int64, up_outer: tl.int64, up_step: tl.int64,
    out, length: tl.int64, ACTIVATION: tl.constexpr, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = (length + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64) // blocks
    i = tl.program_id(0).to(tl.int64) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = i < length
    y, _ = activated(part_of(gate, gate_inner, gate_outer, gate_step, row, i, there), ACTIVATION)
    if up is not None:
        if ROUND_FIRST:
            y = y.to(out.dtype.element_ty).to(tl.float32)
        y *= part_of(up, up_inner, up_outer, up_step, row, i, there)
    tl.store(out + row * length + i, y.to(out.dtype.element_ty), mask=there)


@jit
def swiglu_backward_kernel(
    gate, gate_inner: tl.int64, gate_outer: tl.int64, gate_step: tl.int64,
    up, up_inner: tl.int64, up_outer: tl.int64, up_step: tl.int64,
    grad, grad_inner: tl.int64, grad_outer: tl.int64, grad_step: tl.int64,
    out, more, out_step: tl.int64, length: tl.int64,
    ACTIVATION: tl.constexpr, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the gate into ``out``, that of up into ``more``, each unless None."""
    blocks = (length + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64) // blocks
    i = tl.program_id(0).to(tl.int64) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = i < length
    value, slope = activated(part_of(gate, gate_inner, gate_outer, gate_step, row, i, there), ACTIVATION)
    g = part_of(grad, grad_inner, grad_outer, grad_step, row, i, there)
    if more is not None:
        if ROUND_FIRST:
            value = value.to(more.dtype.element_ty).to(tl.float32)
        tl.store(more + row * out_step + i, (g * value).to(more.dtype.element_ty), mask=there)
    if out is not None:
        if up is not None:
            g *= part_of(up, up_inner, up_outer, up_step, row, i, there)
            if ROUND_FIRST:
                g = g.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * out_step + i, (g * slope).to(out.dtype.element_ty), mask=there)
