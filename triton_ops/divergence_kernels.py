"""The Triton kernels of ``divergence``: a program per row forward, per span of a row backward."""

import triton
import triton.language as tl

from rlkernel.triton_ops.logprob_kernels import (
    LOG2E,
    finite_or_zero,
    halve,
    load_block,
    shift_from,
    sum_vec,
)
from rlkernel.triton_ops.rms_norm_kernels import start_of

SMALLEST = tl.constexpr(2.0**-126)
NEAR = tl.constexpr(1 / 16)  # KL below which a row is read again for its digits

# the strides are specialised: of multiples of 16 rows are loaded 16 bytes at a time
jit = triton.jit(do_not_specialize=["x_inner", "y_inner", "out_inner", "spans"])


@triton.jit
def counted(weight, x):
    """Their product; 0 where the weight is, whatever stands beside it, which may be infinite."""
    return tl.where(weight > 0, weight * x, 0.0)


@triton.jit
def sum_entries(x, LANES: tl.constexpr, VEC: tl.constexpr):
    """The sum of each lane's entries, always in the same order, however they lie in threads."""
    left, right = halve(x, LANES, VEC)
    return sum_vec(left + right, LANES, VEC // 2)


@triton.jit
def sum_lanes(x):
    """The sum of at most 512 numbers in fp64, with the same bits in whatever order a layout adds them.

    They are rounded to multiples of 2^-41 times the power of two below the largest, whose sums are exact.
    """
    x = x.to(tl.float64)
    top = tl.max(tl.abs(x), axis=0)
    power = (top.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    grid = power * 3072.0  # 1.5 * 2^11: what is added to it is rounded to its last place
    exact = tl.sum((x + grid) - grid)
    return tl.where(power < float("inf"), exact, tl.sum(x))  # of infinities one is left, or NaN


@triton.jit
def factor_from(old, new, c):
    """What sums of exponentials below the maximum ``old`` are multiplied with below ``new``."""
    return tl.exp2(shift_from(old, new, c))


@triton.jit
def rise(old, new):
    """How far the maximum has risen; 0 where nothing was below it."""
    return tl.where(old == float("-inf"), 0.0, new - old)


@triton.jit
def exp_series(x):
    """(exp(x) - 1 - x) / x^2 of an x within 0.35 of 0."""
    series = tl.full(x.shape, 1.0 / 5040, tl.float32)
    series = tl.fma(series, x, 1.0 / 720)
    series = tl.fma(series, x, 1.0 / 120)
    series = tl.fma(series, x, 1.0 / 24)
    series = tl.fma(series, x, 1.0 / 6)
    return tl.fma(series, x, 0.5)


@triton.jit
def exp_less_one(x, e):
    """exp(x) - 1 with the digits of a small one: its series within 0.35, where 1 takes some away.

    ``e`` is exp(x).
    """
    return tl.where(tl.abs(x) < 0.35, tl.fma(x * x, exp_series(x), x), e - 1.0)


@triton.jit
def surplus(weight, other, ahead):
    """``weight * ahead + (other - weight)``, with ``ahead = log weight - log other``.

    It is what an element adds to KL(weight || other), as both add up to 1.  None is below 0, and a small one
    has its digits.
    """
    near = weight * (ahead * ahead) * exp_series(-ahead)
    return tl.where(tl.abs(ahead) < 0.35, near, counted(weight, ahead) + (other - weight))


@triton.jit
def ahead_of_mixture(ahead, beta):
    """``log p - log m`` and ``log q - log m``, with ``m = (1 - beta) p + beta q``, of ``log q - log p``.

    The larger of m's two parts is taken out of it: what p, or q, is ahead is then no difference, and keeps
    its digits where it is small, as it is of equal rows and of a beta (fp64) near 0 or 1.
    """
    level = (tl.log(1.0 - beta) - tl.log(beta)).to(tl.float32)  # above it the teacher's part is the larger
    student, teacher = (1.0 - beta).to(tl.float32), beta.to(tl.float32)
    apart = tl.where(ahead > level, -ahead, ahead)  # of the other one, from the one that is taken out
    share, larger = tl.where(ahead > level, student, teacher), tl.where(ahead > level, teacher, student)
    e = tl.exp2(tl.minimum(apart, 88.0) * LOG2E)
    less = share * exp_less_one(apart, e)
    total = 1.0 + less
    rest = tl.maximum(tl.fma(share, e, larger), SMALLEST)
    # near 1 what 1 + less has lost is found again; far from it `less` has lost the larger one's share
    lost = tl.where(less > -0.5, (less - (total - 1.0)) / total, 0.0)
    near = -(tl.log(tl.where(less > -0.5, total, rest)) + lost)
    far = near + apart
    return tl.where(ahead > level, far, near), tl.where(ahead > level, near, far)


@triton.jit
def known_of(m, teacher_m, sum_exp, teacher_sum_exp, inverse):
    """What ``pair_of`` wants of two rows: of the statistics as they are stored, for both directions."""
    total, teacher_total = sum_exp.to(tl.float64), teacher_sum_exp.to(tl.float64)
    inverse_sum, inverse_teacher_sum = (1.0 / total).to(tl.float32), (1.0 / teacher_total).to(tl.float32)
    apart = (tl.log(total) - tl.log(teacher_total)).to(tl.float32)
    c = (inverse * LOG2E).to(tl.float32)
    return m, teacher_m, c, inverse_sum, inverse_teacher_sum, inverse.to(tl.float32), apart


@triton.jit
def pair_of(x, y, known):
    """``p``, ``q`` and ``log q - log p`` of logits, with the digits of a small one."""
    m, teacher_m, c, inverse_sum, inverse_teacher_sum, inverse_t, apart = known
    d, other = x - m, y - teacher_m
    p, q = tl.exp2(d * c) * inverse_sum, tl.exp2(other * c) * inverse_teacher_sum
    return p, q, tl.fma(other - d, inverse_t, apart)


@triton.jit
def load_blocks(x, y, start, V, SCATTERED: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """The same entries of both rows, as floats."""
    a = load_block(x, start, V, SCATTERED, LANES, VEC)
    b = load_block(y, start, V, SCATTERED, LANES, VEC)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def divergence_forward_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    y, y_inner: tl.int64, y_outer: tl.int64, y_step: tl.int64,
    mask, V, temperature: tl.float64, beta: tl.float64,
    divergence, entropy, row_max, sum_exp, teacher_max, teacher_sum_exp, student_part,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, SCATTERED: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if mask is not None:  # noqa: SIM102  (there is nothing to load where it is None)
        if tl.load(mask + row) == 0:  # nothing of the row is read
            zero = tl.zeros((), tl.float32)
            tl.store(divergence + row, zero)
            tl.store(row_max + row, zero)
            tl.store(sum_exp + row, zero)
            tl.store(teacher_max + row, zero)
            tl.store(teacher_sum_exp + row, zero)
            if entropy is not None:
                tl.store(entropy + row, zero)
            if student_part is not None:
                tl.store(student_part + row, zero)
            return
    inverse = 1.0 / tl.full((), temperature, tl.float64)
    beta = tl.full((), beta, tl.float64)
    c = (inverse * LOG2E).to(tl.float32)
    x += start_of(row, x_inner, x_outer, x_step)
    y += start_of(row, y_inner, y_outer, y_step)

    # a maximum and sums per lane, not per entry: VEC entries then share one rescaling and its exp2
    BLOCK: tl.constexpr = LANES * VEC
    m = tl.full((LANES,), float("-inf"), tl.float32)
    teacher_m = tl.full((LANES,), float("-inf"), tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    teacher_s = tl.zeros((LANES,), tl.float32)
    own = tl.zeros((LANES,), tl.float32)  # of e times the difference to the maximum
    gap = tl.zeros((LANES,), tl.float32)  # of the weight times the difference of the two differences
    for start in range(0, V, BLOCK):
        a, b = load_blocks(x, y, start, V, SCATTERED, LANES, VEC)
        top, teacher_top = tl.maximum(m, tl.max(a, axis=1)), tl.maximum(teacher_m, tl.max(b, axis=1))
        safe, teacher_safe = finite_or_zero(top), finite_or_zero(teacher_top)
        factor, teacher_factor = factor_from(m, safe, c), factor_from(teacher_m, teacher_safe, c)
        up, teacher_up = rise(m, safe), rise(teacher_m, teacher_safe)
        d, other = a - safe[:, None], b - teacher_safe[:, None]
        e, of_other = tl.exp2(d * c), tl.exp2(other * c)
        if entropy is not None:
            own = (own - counted(s, up)) * factor + sum_entries(counted(e, d), LANES, VEC)
        if FORWARD:
            gap = (gap + counted(teacher_s, up - teacher_up)) * teacher_factor
            gap += sum_entries(counted(of_other, other - d), LANES, VEC)
        if REVERSE:
            gap = (gap + counted(s, teacher_up - up)) * factor + sum_entries(
                counted(e, d - other), LANES, VEC
            )
        s = s * factor + sum_entries(e, LANES, VEC)
        teacher_s = teacher_s * teacher_factor + sum_entries(of_other, LANES, VEC)
        m, teacher_m = top, teacher_top

    top, teacher_top = tl.max(m, axis=0), tl.max(teacher_m, axis=0)
    safe, teacher_safe = finite_or_zero(top), finite_or_zero(teacher_top)
    factor = factor_from(m, safe, c).to(tl.float64)
    teacher_factor = factor_from(teacher_m, teacher_safe, c).to(tl.float64)
    up, teacher_up = rise(m, safe), rise(teacher_m, teacher_safe)
    total = sum_lanes(s.to(tl.float64) * factor)
    teacher_total = sum_lanes(teacher_s.to(tl.float64) * teacher_factor)
    total = tl.where(total > 0, total, float("nan"))  # a row of -inf alone is no distribution
    teacher_total = tl.where(teacher_total > 0, teacher_total, float("nan"))
    log_sum, teacher_log_sum = tl.log(total), tl.log(teacher_total)
    tl.store(row_max + row, top)
    left, teacher_left = total.to(tl.float32), teacher_total.to(tl.float32)
    tl.store(sum_exp + row, left)
    tl.store(teacher_max + row, teacher_top)
    tl.store(teacher_sum_exp + row, teacher_left)
    if entropy is not None:
        row_own = sum_lanes((own - counted(s, up)).to(tl.float64) * factor)
        tl.store(entropy + row, (log_sum - row_own * inverse / total).to(tl.float32))
    # of the sums that backward is left: what it measures from student_part is then 0 where it should be
    known = known_of(top, teacher_top, left, teacher_left, inverse)
    if FORWARD or REVERSE:
        if FORWARD:
            row_gap = sum_lanes((gap + counted(teacher_s, up - teacher_up)).to(tl.float64) * teacher_factor)
            found = row_gap * inverse / teacher_total + (log_sum - teacher_log_sum)
        else:
            row_gap = sum_lanes((gap + counted(s, teacher_up - up)).to(tl.float64) * factor)
            found = row_gap * inverse / total + (teacher_log_sum - log_sum)
        own_found = found
        if found < NEAR:  # of a difference of two numbers that large little is left
            parts = tl.zeros((LANES,), tl.float32)
            own_parts = tl.zeros((LANES,), tl.float32)
            for start in range(0, V, BLOCK):
                p, q, ahead = pair_of(*load_blocks(x, y, start, V, SCATTERED, LANES, VEC), known)
                part = surplus(q, p, ahead) if FORWARD else surplus(p, q, -ahead)
                parts += sum_entries(part, LANES, VEC)
                if REVERSE:
                    own_parts += sum_entries(counted(p, -ahead), LANES, VEC)
            found = sum_lanes(parts)
            own_found = sum_lanes(own_parts)
        tl.store(divergence + row, found.to(tl.float32))
        if REVERSE:
            tl.store(student_part + row, own_found.to(tl.float32))
    else:
        of_student = tl.zeros((LANES,), tl.float32)
        of_teacher = tl.zeros((LANES,), tl.float32)
        for start in range(0, V, BLOCK):
            p, q, ahead = pair_of(*load_blocks(x, y, start, V, SCATTERED, LANES, VEC), known)
            student_ahead, teacher_ahead = ahead_of_mixture(ahead, beta)
            of_student += sum_entries(counted(p, student_ahead), LANES, VEC)
            of_teacher += sum_entries(counted(q, teacher_ahead), LANES, VEC)
        part, other_part = sum_lanes(of_student), sum_lanes(of_teacher)
        nan = total * 0.0 + teacher_total * 0.0  # which counted() passes over
        tl.store(divergence + row, ((1.0 - beta) * part + beta * other_part + nan).to(tl.float32))
        tl.store(student_part + row, (part + nan).to(tl.float32))


@jit
def divergence_backward_kernel(
    x, x_inner: tl.int64, x_outer: tl.int64, x_step: tl.int64,
    y, y_inner: tl.int64, y_outer: tl.int64, y_step: tl.int64,
    mask, V, temperature: tl.float64, beta: tl.float64,
    grad, row_max, sum_exp, teacher_max, teacher_sum_exp, student_part,
    out, out_inner: tl.int64, out_outer: tl.int64, out_step: tl.int64, spans: tl.int64,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // spans
    begin = (tl.program_id(0).to(tl.int64) % spans * SPAN).to(tl.int32)
    end = tl.minimum(begin + SPAN, V)
    out += start_of(row, out_inner, out_outer, out_step)
    offsets = tl.arange(0, BLOCK)
    g = tl.load(grad + row)
    if mask is not None:
        g = tl.where(tl.load(mask + row) == 0, 0.0, g)
    if g == 0:
        for start in range(begin, end, BLOCK):
            columns = start + offsets
            tl.store(out + columns, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < end)
        return
    x += start_of(row, x_inner, x_outer, x_step)
    y += start_of(row, y_inner, y_outer, y_step)
    inverse = 1.0 / tl.full((), temperature, tl.float64)
    beta = tl.full((), beta, tl.float64)
    total, teacher_total = tl.load(sum_exp + row), tl.load(teacher_sum_exp + row)
    known = known_of(tl.load(row_max + row), tl.load(teacher_max + row), total, teacher_total, inverse)
    scale = g.to(tl.float64) * inverse
    if not FORWARD:
        part = tl.load(student_part + row)
        scale += (part * 0.0).to(tl.float64)  # an infinite one has no gradient
        if not REVERSE:
            scale *= 1.0 - beta
    scale += total * 0.0 + teacher_total * 0.0
    factor = scale.to(tl.float32)
    for start in range(begin, end, BLOCK):
        columns = start + offsets
        there = columns < end
        a = tl.load(x + columns, mask=there, other=float("-inf"), eviction_policy="evict_first")
        b = tl.load(y + columns, mask=there, other=float("-inf"), eviction_policy="evict_first")
        p, q, ahead = pair_of(a.to(tl.float32), b.to(tl.float32), known)
        if FORWARD:
            d = p - q
        elif REVERSE:
            d = counted(p, -ahead - part)
        else:
            d = counted(p, ahead_of_mixture(ahead, beta)[0] - part)
        tl.store(out + columns, (d * factor).to(out.dtype.element_ty), mask=there)
