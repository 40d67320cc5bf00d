"""The Triton kernels of ``logprob``, over a tile: some consecutive entries of the vocabulary.

``logprob`` passes one tile, ``linear_logprob`` many.  With ``u = (x + bias) * logit_scale``, ``y = u`` or
``softcap * tanh(u / softcap)``, and T the temperature, a row's statistics are ``m = max y``,
``s = sum exp((y - m) / T)`` and ``w = sum exp((y - m) / T) * (y - m) / T`` (in units of log 2).

A row's bits depend on its values only.  Triton picks the order of a float reduction by the layout, and the
layout by the alignment of the arguments.  So each lane sums its own entries in the order of the vocabulary,
fused multiply-adds are written out and never left to the compiler, and the lanes are summed as integers,
in any order.
"""

import triton
import triton.language as tl

from rlkernel.calls.logprob import State as STATE
from rlkernel.calls.sampling import MASS_ONE
from rlkernel.triton_ops._names import Names

State = Names(tuple(STATE.__members__))  # rows of what is carried from tile to tile
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIXED_POINT = tl.constexpr(MASS_ONE)  # lanes are summed as multiples of 1 / it


@triton.jit
def load_temperature(temperatures, temperature, row):
    if temperatures is not None:
        t = tl.load(temperatures + row).to(tl.float64)
    else:
        t = tl.full((), temperature, tl.float64)
    return t


@triton.jit
def bounded(u, softcap):
    """``softcap * tanh(u / softcap)`` and its derivative.

    Both come from ``e = exp(-2 |x|)`` because ``1 - tanh**2`` loses all digits where tanh saturates; a
    polynomial (fitted to ``tanh(x) / x``, 1 ulp) takes over where ``1 - e`` would cancel.
    """
    x = u / softcap
    size = tl.abs(x)
    e = tl.exp2(size * (-2 * LOG2E))
    q = 1.0 / (1.0 + e)
    large = 1.0 - 2.0 * (e * q)
    z = x * x
    p = tl.fma(z, -0.006615754700186362, 0.021312744501013465)
    p = tl.fma(p, z, -0.05391006651435136)
    p = tl.fma(p, z, 0.13333117616689902)
    p = tl.fma(p, z, -0.333333320452083)
    small = tl.fma(x * z, p, x)
    y = tl.where(size < 0.55, small, tl.where(x < 0, -large, large))
    return softcap * y, 4.0 * (e * q) * q


@triton.jit
def load_block(x_ptr, start, V, SCATTERED: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """``x[start:]`` as [LANES, VEC], -inf beyond V.

    Rows that do not start at multiples of 16 bytes cannot be loaded 16 bytes at a time.  Triton would then
    spread a lane over threads, with six times the registers; loaded entry by entry of all lanes, it stays in
    one thread.
    """
    if SCATTERED:
        i = tl.arange(0, LANES * VEC)
        columns = start + (i % LANES) * VEC + i // LANES
        x = tl.load(x_ptr + columns, mask=columns < V, other=float("-inf"), eviction_policy="evict_first")
        x = tl.trans(tl.reshape(x, (VEC, LANES)))
    else:
        columns = start + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
        x = tl.load(x_ptr + columns, mask=columns < V, other=float("-inf"), eviction_policy="evict_first")
    return x


@triton.jit
def transform(x, bias, offsets, mask, logit_scale, softcap):
    """``y`` and, where there is a softcap, ``dy/du`` (else y itself, unused)."""
    y = x.to(tl.float32)
    if bias is not None:
        y += tl.load(bias + offsets, mask=mask, other=0.0)
    if logit_scale is not None:
        y *= logit_scale
    slope = y
    if softcap is not None:
        y, slope = bounded(y, softcap)
    return y, slope


@triton.jit
def shift_from(old, new, c):
    """log2 of the factor of a sum whose maximum grows from ``old`` to ``new``; 0 for an empty sum (-inf)."""
    shift = tl.maximum((old - new) * c, -150.0)  # 2**-150 is 0 in fp32, 0 * -inf would be NaN
    return tl.where(old == float("-inf"), 0.0, shift)


@triton.jit
def finite_or_zero(m):
    """-inf, the maximum of nothing, replaced by 0: ``-inf - -inf`` is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def halve(x, LANES: tl.constexpr, VEC: tl.constexpr):
    return tl.split(tl.reshape(x, (LANES, VEC // 2, 2)))


@triton.jit
def sum_vec(x, LANES: tl.constexpr, VEC: tl.constexpr):
    """The sum of each lane's VEC (1, 2 or 4) entries, always in the same order."""
    if VEC >= 4:
        even, odd = halve(x, LANES, 4)
        x = even + odd
    if VEC >= 2:
        left, right = halve(x, LANES, 2)
        x = left + right
    return tl.reshape(x, (LANES,))


@triton.jit
def sum_lanes(x):
    return tl.sum((x * FIXED_POINT).to(tl.int64)).to(tl.float64) * (1.0 / FIXED_POINT)


@triton.jit
def load_state(state, stride):
    """``(m, s, w)`` of a row, or of rows, s and w in fp64."""
    s = tl.load(state + State.sum_exp * stride).to(tl.float64)
    w = tl.load(state + State.weighted_sum * stride).to(tl.float64)
    return tl.load(state + State.maximum * stride), s, w


@triton.jit
def merge(m0, s0, w0, m, s, w, c):
    """The statistics of two parts of a row together; scalars or vectors of rows, s and w in fp64."""
    top = tl.maximum(m0, m)
    safe = finite_or_zero(top)
    shift0, shift = shift_from(m0, safe, c), shift_from(m, safe, c)
    a0, a = tl.exp2(shift0).to(tl.float64), tl.exp2(shift).to(tl.float64)
    weighted = (w0 + s0 * shift0) * a0 + (w + s * shift) * a
    return top, s0 * a0 + s * a, weighted


@triton.jit
def finish(m, s, w, y_target, t):
    """``(logprob, entropy, lse, log_sum)`` in fp64; ``w`` is in units of log 2."""
    log_sum = tl.log(s)
    inv_t = 1.0 / t
    logprob = (y_target.to(tl.float64) - m.to(tl.float64)) * inv_t - log_sum
    lse = m.to(tl.float64) * inv_t + log_sum
    # a target outside the vocabulary makes the gradient row NaN through log_sum
    kept_log_sum = tl.where(y_target != y_target, float("nan"), log_sum)
    return logprob, log_sum - w * LN2 / s, lse, kept_log_sum


@triton.jit
def store_statistics(logprobs, entropy, lse, row_max, log_sum, rows, values, mask=None):
    """What is known of a row, or of rows: five numbers in the order of the tensors."""
    logprob, row_entropy, row_lse, m, row_log_sum = values
    tl.store(logprobs + rows, logprob.to(tl.float32), mask=mask)
    tl.store(lse + rows, row_lse.to(tl.float32), mask=mask)
    tl.store(row_max + rows, m.to(tl.float32), mask=mask)
    tl.store(log_sum + rows, row_log_sum.to(tl.float32), mask=mask)
    if entropy is not None:
        tl.store(entropy + rows, row_entropy.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["inner", "vocab_start", "ignore_index", "state_stride"])
def forward_kernel(
    tile, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V, vocab_start: tl.int64,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64, bias, logit_scale, softcap,
    state, state_stride: tl.int64, logprobs, entropy, lse, row_max, log_sum,
    FIRST: tl.constexpr, LAST: tl.constexpr, SCATTERED: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ids + row)
    if target == ignore_index:  # nothing of the row is read
        if LAST:
            zero = tl.zeros((), tl.float32)
            store_statistics(logprobs, entropy, lse, row_max, log_sum, row, (zero, zero, zero, zero, zero))
        if state is not None:  # finite, for those who compute on with the state of all rows
            for k in tl.static_range(len(State)):
                tl.store(state + k * state_stride + row, 0.0)
        return
    t = load_temperature(temperatures, temperature, row)
    c = (1.0 / t * LOG2E).to(tl.float32)
    x_ptr = tile + (row // inner) * outer_stride + (row % inner) * inner_stride

    index = target - vocab_start
    here = (index >= 0) & (index < V)
    x_target = tl.load(x_ptr + index, mask=here, other=0.0)
    y_target = transform(x_target, bias, index, here, logit_scale, softcap)[0]
    if FIRST:
        y_target = tl.where(here, y_target, float("nan"))
    else:
        y_target = tl.where(here, y_target, tl.load(state + State.at_target * state_stride + row))

    # a maximum and sums per lane, not per entry: VEC entries then share one rescaling and its exp2
    BLOCK: tl.constexpr = LANES * VEC
    offsets = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    lane_max = tl.full((LANES,), float("-inf"), tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    w = tl.zeros((LANES,), tl.float32)
    x = load_block(x_ptr, 0, V, SCATTERED, LANES, VEC)
    for start in range(0, V, BLOCK):
        columns = start + offsets
        x_next = load_block(x_ptr, start + BLOCK, V, SCATTERED, LANES, VEC)  # under way while x is computed
        y = transform(x, bias, columns, columns < V, logit_scale, softcap)[0]
        if logit_scale is not None or softcap is not None:  # these do not keep the -inf beyond the end
            y = tl.where(columns < V, y, float("-inf"))
        top = tl.maximum(lane_max, tl.max(y, axis=1))
        safe = finite_or_zero(top)
        shift = shift_from(lane_max, safe, c)
        a = tl.exp2(shift)
        d = (y - safe[:, None]) * c
        e = tl.exp2(d)
        e0, e1 = halve(e, LANES, VEC)
        if entropy is not None:
            d0, d1 = halve(tl.maximum(d, -150.0), LANES, VEC)  # 2**-150 is 0 in fp32, 0 * -inf would be NaN
            weighted = sum_vec(tl.fma(e1, d1, e0 * d0), LANES, VEC // 2)
            w = tl.fma(tl.fma(s, shift, w), a, weighted)
        s = tl.fma(s, a, sum_vec(e0 + e1, LANES, VEC // 2))
        lane_max = top
        x = x_next

    m = tl.max(lane_max, axis=0)
    shift = shift_from(lane_max, finite_or_zero(m), c)
    a = tl.exp2(shift)
    not_a_number = tl.max((s != s).to(tl.int32)) > 0  # an integer cannot carry it
    total = tl.where(not_a_number, float("nan"), sum_lanes(s * a))
    row_w = tl.full((), 0.0, tl.float64)
    if entropy is not None:
        row_w = sum_lanes(tl.fma(s, shift, w) * a)
    if not FIRST:
        m0, s0, w0 = load_state(state + row, state_stride)
        m, total, row_w = merge(m0, s0, w0, m, total, row_w, c)
    if state is not None:
        tl.store(state + State.maximum * state_stride + row, m)
        tl.store(state + State.sum_exp * state_stride + row, total.to(tl.float32))
        tl.store(state + State.weighted_sum * state_stride + row, row_w.to(tl.float32))
        tl.store(state + State.at_target * state_stride + row, y_target)
    if LAST:
        row_logprob, row_entropy, row_lse, row_log_sum = finish(m, total, row_w, y_target, t)
        values = row_logprob, row_entropy, row_lse, m, row_log_sum
        store_statistics(logprobs, entropy, lse, row_max, log_sum, row, values)


@triton.jit(do_not_specialize=["inner", "vocab_start", "ignore_index", "spans"])
def backward_kernel(
    tile, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V, vocab_start: tl.int64,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64, bias, logit_scale, softcap,
    grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum,
    out, out_outer_stride: tl.int64, out_inner_stride: tl.int64, spans: tl.int64,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // spans
    begin = ((tl.program_id(0) % spans) * SPAN).to(tl.int32)
    end = tl.minimum(begin + SPAN, V)
    out_ptr = out + (row // inner) * out_outer_stride + (row % inner) * out_inner_stride
    target = tl.load(target_ids + row)
    offsets = tl.arange(0, BLOCK)
    if target == ignore_index:
        for start in range(begin, end, BLOCK):
            columns = start + offsets
            tl.store(out_ptr + columns, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < end)
        return
    x_ptr = tile + (row // inner) * outer_stride + (row % inner) * inner_stride
    t = load_temperature(temperatures, temperature, row)
    m = tl.load(row_max + row)
    log_s = tl.load(log_sum + row).to(tl.float64)
    c = (1.0 / t * LOG2E).to(tl.float32)
    base = (log_s * -LOG2E).to(tl.float32)
    factor = 1.0 / t
    if logit_scale is not None:
        factor *= logit_scale
    g_logprob = tl.full((), 0.0, tl.float64)
    g_lse = tl.full((), 0.0, tl.float64)
    if grad_logprobs is not None:
        g_logprob = tl.load(grad_logprobs + row).to(tl.float64)
    if grad_lse is not None:
        g_lse = tl.load(grad_lse + row).to(tl.float64)
    pull = ((g_lse - g_logprob) * factor).to(tl.float32)  # of every entry, times p
    if grad_entropy is not None:
        h = tl.load(entropy + row)
        g_entropy = tl.load(grad_entropy + row).to(tl.float64)
        spread = (g_entropy * factor).to(tl.float32)

    index = target - vocab_start
    here = (index >= begin) & (index < end)
    if grad_logprobs is not None:
        # 1 - p_t from log p_t in fp64: the difference of fp32 numbers loses all digits as p_t -> 1
        x_target = tl.load(x_ptr + index, mask=here, other=0.0)
        y_target = transform(x_target, bias, index, here, logit_scale, softcap)[0]
        logp = (y_target.to(tl.float64) - m.to(tl.float64)) / t - log_s
        p_target = tl.exp(logp)
        rest = tl.where(logp > -1e-4, -logp * (1.0 + 0.5 * logp), 1.0 - p_target)
        at_target = g_logprob * rest + g_lse * p_target
        if grad_entropy is not None:
            at_target -= g_entropy * tl.where(p_target == 0.0, 0.0, p_target * (logp + h))
        at_target = (at_target * factor).to(tl.float32)
        tl.debug_barrier()  # out may be the tile: all warps have read the target before one overwrites it

    for start in range(begin, end, BLOCK):
        columns = start + offsets
        mask = columns < end
        x = tl.load(x_ptr + columns, mask=mask, other=0.0, eviction_policy="evict_first")
        y, slope = transform(x, bias, columns, mask, logit_scale, softcap)
        log2_p = tl.fma(y - m, c, base)
        p = tl.exp2(log2_p)
        if grad_entropy is not None:
            g = tl.where(p == 0.0, 0.0, p * (pull - spread * (log2_p * LN2 + h)))  # not 0 * -inf
        else:
            g = p * pull
        if grad_logprobs is not None:
            g = tl.where(here & (columns == index), at_target, g)
        if softcap is not None:
            g *= slope
        tl.store(out_ptr + columns, g.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner", "vocab_start", "ignore_index", "spans"])
def exp_kernel(
    tile, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V, vocab_start: tl.int64,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64, bias, logit_scale, softcap,
    row_max, out, out_outer_stride: tl.int64, out_inner_stride: tl.int64, spans: tl.int64,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // spans
    begin = ((tl.program_id(0) % spans) * SPAN).to(tl.int32)
    end = tl.minimum(begin + SPAN, V)
    x_ptr = tile + (row // inner) * outer_stride + (row % inner) * inner_stride
    out_ptr = out + (row // inner) * out_outer_stride + (row % inner) * out_inner_stride
    target = tl.load(target_ids + row)
    offsets = tl.arange(0, BLOCK)
    if target == ignore_index:
        for start in range(begin, end, BLOCK):
            columns = start + offsets
            tl.store(out_ptr + columns, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < end)
        return
    t = load_temperature(temperatures, temperature, row)
    m = tl.load(row_max + row)
    c = (1.0 / t * LOG2E).to(tl.float32)
    factor = 1.0 / t
    if logit_scale is not None:
        factor *= logit_scale
    factor = factor.to(tl.float32)
    index = target - vocab_start
    for start in range(begin, end, BLOCK):
        columns = start + offsets
        mask = columns < end
        x = tl.load(x_ptr + columns, mask=mask, other=0.0, eviction_policy="evict_first")
        y, slope = transform(x, bias, columns, mask, logit_scale, softcap)
        g = tl.exp2((y - m) * c) * factor
        if softcap is not None:
            g *= slope
        g = tl.where(columns == index, 0.0, g)
        tl.store(out_ptr + columns, g.to(out.dtype.element_ty), mask=mask)
