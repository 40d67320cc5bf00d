"""The Triton kernels of ``logprob`` over supports: a program takes the tokens that one row keeps.

With d the distances of their logits to the largest, ``m = round(2**40 * exp(d / T))`` are integers, whose
sums have no order: a row's bits are those of ``sampling``, whatever the order of the ids and the layout that
Triton picks.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops.logprob_kernels import FIXED_POINT, LN2, LOG2E, store_statistics
from rlkernel.triton_ops.sampling_kernels import load_scalar

EXACT = tl.constexpr(2.0**23)  # from here on every float is an integer


@triton.jit
def mass_of(e):
    """The nearest integer of ``2**40 * e``, ties to even; the scaling is exact."""
    x = e * FIXED_POINT
    size = tl.abs(x)
    rounded = (size + EXACT) - EXACT
    rounded = tl.where(x < 0, -rounded, rounded)
    return tl.where(size < EXACT, rounded, x).to(tl.int64)


@triton.jit(do_not_specialize=["inner", "V", "ignore_index"])
def support_forward_kernel(
    logits, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float32,
    ids, offsets, values, logprobs, entropy, lse, row_max, log_sum,
    GATHERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - begin).to(tl.int32)
    target = tl.load(target_ids + row)
    if (count <= 0) | (target == ignore_index):  # whole rows are the sampling op's
        zero = tl.zeros((), tl.float32)
        store_statistics(logprobs, entropy, lse, row_max, log_sum, row, (zero, zero, zero, zero, zero))
        return
    x_ptr = logits + (row // inner) * outer_stride + (row % inner) * inner_stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.full((BLOCK,), float("-inf"), tl.float32)
    found = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        mask = start + lanes < count
        k = begin + start + lanes
        token = tl.load(ids + k, mask=mask, other=0)
        if GATHERED:
            x = tl.load(values + k, mask=mask, other=float("-inf"))
        else:
            inside = (token >= 0) & (token < V)
            x = tl.load(x_ptr + token, mask=mask & inside, other=float("-inf"))
            x = tl.where(mask & (inside == 0), float("nan"), x)
            tl.store(values + k, x.to(values.dtype.element_ty), mask=mask)
        y = x.to(tl.float32)
        top = tl.maximum(top, y)
        bad |= ((y < float("inf")) == 0).to(tl.int32)  # NaN too
        hit = mask & (token == target)
        at = tl.where(hit, y, at)
        found |= hit.to(tl.int32)
    m = tl.max(top, axis=0)
    y_target = tl.max(at, axis=0)
    is_kept = tl.max(found, axis=0) > 0
    sound = (tl.max(bad, axis=0) == 0) & (m > float("-inf"))
    safe = tl.where(sound, m, 0.0)
    t = load_scalar(temperatures, temperature, row).to(tl.float64)  # by way of fp32, as sampling takes it
    c = (1.0 / t * LOG2E).to(tl.float32)
    masses = tl.zeros((BLOCK,), tl.int64)
    weighted = tl.zeros((BLOCK,), tl.int64)
    tl.debug_barrier()  # what one thread has written to values, another may read
    for start in range(0, count, BLOCK):
        mask = start + lanes < count
        x = tl.load(values + begin + start + lanes, mask=mask, other=float("-inf"))
        d = (x.to(tl.float32) - safe) * c
        e = tl.where(sound, tl.exp2(d), 0.0)
        masses += mass_of(e)
        if entropy is not None:
            weighted += mass_of(tl.where(e == 0.0, 0.0, e * d))
    total = tl.sum(masses, axis=0).to(tl.float64)
    row_log_sum = tl.log(tl.where(sound, total, float("nan")) * (1.0 / FIXED_POINT))
    inv_t = 1.0 / t
    logprob = (y_target.to(tl.float64) - m.to(tl.float64)) * inv_t - row_log_sum
    logprob = tl.where(is_kept | (sound == 0), logprob, float("-inf"))
    nan_or_max = tl.where(sound, m, float("nan"))
    row_lse = nan_or_max.to(tl.float64) * inv_t + row_log_sum
    row_entropy = row_log_sum - tl.sum(weighted, axis=0).to(tl.float64) / total * LN2
    values = logprob, row_entropy, row_lse, nan_or_max, row_log_sum
    store_statistics(logprobs, entropy, lse, row_max, log_sum, row, values)


@triton.jit(do_not_specialize=["inner", "V", "ignore_index"])
def support_backward_kernel(
    values, target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float32, ids, offsets,
    grad_logprobs, grad_entropy, grad_lse, logprobs, entropy, row_max, log_sum,
    out, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V,
    SCATTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - begin).to(tl.int32)
    target = tl.load(target_ids + row)
    if (count <= 0) | (target == ignore_index):
        return
    t = load_scalar(temperatures, temperature, row).to(tl.float64)  # by way of fp32, as sampling takes it
    m = tl.load(row_max + row)
    log_s = tl.load(log_sum + row).to(tl.float64)
    logprob = tl.load(logprobs + row).to(tl.float64)
    factor = 1.0 / t
    c = (factor * LOG2E).to(tl.float32)
    base = (log_s * -LOG2E).to(tl.float32)
    g_logprob = tl.full((), 0.0, tl.float64)
    g_lse = tl.full((), 0.0, tl.float64)
    if grad_logprobs is not None:
        # a token of probability 0 cannot be made likelier by a small step
        g_logprob = tl.where(logprob == float("-inf"), 0.0, tl.load(grad_logprobs + row).to(tl.float64))
    if grad_lse is not None:
        g_lse = tl.load(grad_lse + row).to(tl.float64)
    pull = ((g_lse - g_logprob) * factor).to(tl.float32)  # of every entry, times p
    finite_logprob = tl.where(logprob == float("-inf"), 0.0, logprob)
    p_target = tl.where(logprob == float("-inf"), 0.0, tl.exp(finite_logprob))
    # 1 - p_t from log p_t: the difference loses all digits as p_t -> 1
    rest = tl.where(finite_logprob > -1e-4, -finite_logprob * (1.0 + 0.5 * finite_logprob), 1.0 - p_target)
    at_target = g_logprob * rest + g_lse * p_target
    if grad_entropy is not None:
        h = tl.load(entropy + row)
        g_entropy = tl.load(grad_entropy + row).to(tl.float64)
        spread = (g_entropy * factor).to(tl.float32)
        at_target -= g_entropy * tl.where(p_target == 0.0, 0.0, p_target * (finite_logprob + h))
    at_target = (at_target * factor).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    out_ptr = out + (row // inner) * outer_stride + (row % inner) * inner_stride
    for start in range(0, count, BLOCK):
        mask = start + lanes < count
        k = begin + start + lanes
        token = tl.load(ids + k, mask=mask, other=0)
        y = tl.load(values + k, mask=mask, other=0.0).to(tl.float32)
        log2_p = tl.fma(y - m, c, base)
        p = tl.exp2(log2_p)
        g = p * pull
        if grad_entropy is not None:
            g = tl.where(p == 0.0, 0.0, p * (pull - spread * (log2_p * LN2 + h)))  # not 0 * -inf
        g = tl.where(token == target, at_target, g)
        if SCATTERED:
            mask = mask & (token >= 0) & (token < V)
            tl.store(out_ptr + token, g.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(out + k, g.to(out.dtype.element_ty), mask=mask)
