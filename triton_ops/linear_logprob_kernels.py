"""The Triton kernels of the fused ``linear_logprob``: no tile of logits leaves the registers as it is.

One main loop, that of ``_tile_product``, multiplies a block of rows with a block of the vocabulary.  Forward
keeps the rows' softmax of it, backward makes of it the gradient of the logits in the operands' dtype, and a
third kernel multiplies that gradient with the weight and with the hidden states.  Every sum over H, V or the
rows is one chain of fp32 in their order, whatever the tile around it: both passes see the same logits, to the
bit, and a chain that is stored in fp32 and continued has the bits of one that was never cut.

``count`` is how many of the N rows there are, on the device: it is data, and nobody waits for it.

A program of forward takes tile after tile: where warps of their own copy, what the next one needs arrives
while this one is summed.
"""

import triton
import triton.language as tl

from rlkernel.calls.logprob import State as STATE
from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops._tile_product import tile_place, tile_product
from rlkernel.triton_ops.logprob_kernels import (
    LN2,
    LOG2E,
    finish,
    finite_or_zero,
    load_temperature,
    shift_from,
    store_statistics,
    transform,
)

# planes of what a tile of the vocabulary leaves of each row, behind those of State
Extra = Names((*STATE.__members__, "squares", "total"))
# planes of what the gradient of a row's logits is made of
Row = Names(("scale", "base", "pull", "spread", "at_target"))


@triton.jit(do_not_specialize=["N", "V"])
def product_kernel(
    hidden, hidden_stride: tl.int64, weight, weight_stride: tl.int64, N, V, H, count, target_ids,
    temperatures, temperature: tl.float64, bias, logit_scale, softcap, part,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, TOTAL: tl.constexpr,
    COMPUTE: tl.constexpr, LOGITS: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE_K: tl.constexpr, SPECIALIZED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of each tile of the vocabulary and each row its maximum, its sums and its value at the target."""
    row_tiles = tl.cdiv(tl.minimum(tl.load(count), N), BM)  # nothing is read for rows that there are not
    column_tiles = tl.cdiv(V, BN)
    plane = column_tiles.to(tl.int64) * N
    if DESCRIBED:
        hidden = tl.make_tensor_descriptor(hidden, [N, H], [hidden_stride, 1], [BM, BK])
        weight = tl.make_tensor_descriptor(weight, [V, H], [weight_stride, 1], [BN, BK])
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_block, block = tile_place(tile, row_tiles, column_tiles, GROUP)
        rows = row_block * BM + tl.arange(0, BM)
        inside = rows < N
        row = tl.minimum(rows, N - 1)  # rows beyond the end repeat the last, and are not stored
        c = tl.broadcast_to(
            (1.0 / load_temperature(temperatures, temperature, row) * LOG2E).to(tl.float32), (BM,)
        )
        target = tl.load(target_ids + row) - block * BN
        target = tl.where((target >= 0) & (target < BN), target, -1).to(tl.int32)
        y = tile_product(
            hidden, hidden_stride, weight, weight_stride, row_block * BM, block * BN, N, V, H,
            tl.zeros((BM, BN), tl.float32), False, False,
            COMPUTE, DESCRIBED, WHOLE_K, SPECIALIZED, BM, BN, BK,
        )  # fmt: skip
        within = tl.arange(0, BN)
        columns = block * BN + within
        known = (columns < V)[None, :]
        y = transform(y.to(LOGITS), bias, columns[None, :], known, logit_scale, softcap)[0]
        y_target = tl.sum(tl.where(within[None, :] == target[:, None], y, 0.0), axis=1)
        if TOTAL:
            total = tl.sum(tl.where(known, y, 0.0), axis=1)
        y = tl.where(known, y, float("-inf"))
        m = tl.max(y, axis=1)
        d = (y - finite_or_zero(m)[:, None]) * c[:, None]
        e = tl.exp2(d)
        s = tl.sum(e, axis=1)
        if ENTROPY:
            weighted = tl.sum(e * tl.maximum(d, -150.0), axis=1)  # as in logprob: 0 * -inf would be NaN
        if SQUARES:
            squares = tl.sum(e * e, axis=1)
        # all at once behind the sums: each store has a barrier, across which the tile would stay in registers
        out = part + block.to(tl.int64) * N + rows
        tl.store(out + Extra.maximum * plane, m, mask=inside)
        tl.store(out + Extra.sum_exp * plane, s, mask=inside)
        tl.store(out + Extra.at_target * plane, y_target, mask=inside)
        if ENTROPY:
            tl.store(out + Extra.weighted_sum * plane, weighted, mask=inside)
        if SQUARES:
            tl.store(out + Extra.squares * plane, squares, mask=inside)
        if TOTAL:
            tl.store(out + Extra.total * plane, total, mask=inside)


@triton.jit(do_not_specialize=["N", "V", "parts"])
def merge_kernel(
    part, N, V, parts, count, target_ids, temperatures, temperature: tl.float64,
    logprobs, entropy, lse, row_max, log_sum, mean_logits, is_top1, log_sum_sq_probs,
    BN: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tiles of each row in the order of the vocabulary, PARTS at a time, in fp64."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.load(count)
    row = tl.where(inside, rows, 0).to(tl.int64)
    targets = tl.load(target_ids + row)
    t = tl.broadcast_to(load_temperature(temperatures, temperature, row), (ROWS,))
    c = (1.0 / t * LOG2E).to(tl.float32)
    plane = parts.to(tl.int64) * N
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float64)
    w = tl.zeros((ROWS,), tl.float64)
    squares = tl.zeros((ROWS,), tl.float64)
    total = tl.zeros((ROWS,), tl.float64)
    for start in range(0, parts, PARTS):
        index = start + tl.arange(0, PARTS)
        here = (index < parts)[:, None]
        at = part + index.to(tl.int64)[:, None] * N + row[None, :]
        m1 = tl.load(at + Extra.maximum * plane, mask=here, other=float("-inf"))
        s1 = tl.load(at + Extra.sum_exp * plane, mask=here, other=0.0).to(tl.float64)
        top = tl.maximum(m, tl.max(m1, axis=0))
        safe = finite_or_zero(top)
        shift0, shift = shift_from(m, safe, c), shift_from(m1, safe[None, :], c[None, :])
        a0, a = tl.exp2(shift0).to(tl.float64), tl.exp2(shift).to(tl.float64)
        if entropy is not None:
            w1 = tl.load(at + Extra.weighted_sum * plane, mask=here, other=0.0).to(tl.float64)
            w = (w + s * shift0) * a0 + tl.sum((w1 + s1 * shift) * a, axis=0)
        s = s * a0 + tl.sum(s1 * a, axis=0)
        if mean_logits is not None:
            total += tl.sum(tl.load(at + Extra.total * plane, mask=here, other=0.0).to(tl.float64), axis=0)
        if log_sum_sq_probs is not None:
            more = tl.load(at + Extra.squares * plane, mask=here, other=0.0).to(tl.float64)
            squares = squares * (a0 * a0) + tl.sum(more * (a * a), axis=0)
        m = top
    known = (targets >= 0) & (targets < V)
    at = part + Extra.at_target * plane + tl.where(known, targets // BN, 0) * N + row
    y_target = tl.load(at, mask=known, other=float("nan"))
    row_logprob, row_entropy, row_lse, row_log_sum = finish(m, s, w, y_target, t)
    values = row_logprob, row_entropy, row_lse, m, row_log_sum
    store_statistics(logprobs, entropy, lse, row_max, log_sum, rows, values, inside)
    if mean_logits is not None:
        tl.store(mean_logits + rows, (total / V / t).to(tl.float32), mask=inside)
    if is_top1 is not None:
        tl.store(is_top1 + rows, y_target >= m, mask=inside)
    if log_sum_sq_probs is not None:
        tl.store(log_sum_sq_probs + rows, (tl.log(squares) - 2.0 * tl.log(s)).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["N"])
def row_gradient_kernel(
    N, count, temperatures, temperature: tl.float64, logit_scale, grad_logprobs, grad_entropy, grad_lse,
    logprobs, entropy, log_sum, table, ROWS: tl.constexpr,
):  # fmt: skip
    """The planes of ``Row``, once a row: no tile needs fp64 again.  Zeros make a gradient of 0."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    kept = rows < tl.load(count)
    row = tl.minimum(rows, N - 1)
    t = tl.broadcast_to(load_temperature(temperatures, temperature, row), (ROWS,))
    factor = 1.0 / t
    if logit_scale is not None:
        factor *= logit_scale
    g_logprob = tl.zeros((ROWS,), tl.float64)
    g_entropy = tl.zeros((ROWS,), tl.float64)
    g_lse = tl.zeros((ROWS,), tl.float64)
    h = tl.zeros((ROWS,), tl.float64)
    if grad_logprobs is not None:
        g_logprob = tl.load(grad_logprobs + row).to(tl.float64)
    if grad_lse is not None:
        g_lse = tl.load(grad_lse + row).to(tl.float64)
    # 1 - p of the target from log p: the difference of fp32 numbers loses all digits as p -> 1
    logp = tl.load(logprobs + row).to(tl.float64)
    p = tl.exp(logp)
    rest = tl.where(logp > -1e-4, -logp * (1.0 + 0.5 * logp), 1.0 - p)
    at_target = g_logprob * rest + g_lse * p
    if grad_entropy is not None:
        g_entropy = tl.load(grad_entropy + row).to(tl.float64)
        h = tl.load(entropy + row).to(tl.float64)
        at_target -= g_entropy * tl.where(p == 0.0, 0.0, p * (logp + h))
    base = tl.load(log_sum + row).to(tl.float64) * -LOG2E
    pull = (g_lse - g_logprob - g_entropy * h) * factor  # of every entry, times p
    out, plane = table + rows, N.to(tl.int64)
    tl.store(out + Row.scale * plane, tl.where(kept, LOG2E / t, 0.0).to(tl.float32), mask=inside)
    tl.store(out + Row.base * plane, tl.where(kept, base, 0.0).to(tl.float32), mask=inside)
    tl.store(out + Row.pull * plane, tl.where(kept, pull, 0.0).to(tl.float32), mask=inside)
    tl.store(
        out + Row.spread * plane, tl.where(kept, g_entropy * factor * LN2, 0.0).to(tl.float32), mask=inside
    )
    tl.store(out + Row.at_target * plane, tl.where(kept, at_target * factor, 0.0).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["N", "V", "vocab_start", "plane"])
def logits_gradient_kernel(
    hidden, hidden_stride: tl.int64, weight, weight_stride: tl.int64, N, V, H, count, vocab_start,
    target_ids, bias, logit_scale, softcap, table, plane: tl.int64, row_max, out, out_stride: tl.int64,
    SPREAD: tl.constexpr, TARGET: tl.constexpr, COMPUTE: tl.constexpr, LOGITS: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE_K: tl.constexpr, SPECIALIZED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits of V entries from ``vocab_start`` on; 0 in rows behind ``count``."""
    row_block, block = tile_place(tl.program_id(0), tl.cdiv(N, BM), tl.cdiv(V, BN), GROUP)
    rows = row_block * BM + tl.arange(0, BM)
    row = tl.minimum(rows, N - 1)
    there = row_block * BM < tl.load(count)
    if DESCRIBED:
        hidden = tl.make_tensor_descriptor(hidden, [N, H], [hidden_stride, 1], [BM, BK])
        weight = tl.make_tensor_descriptor(weight, [V, H], [weight_stride, 1], [BN, BK])
        out = tl.make_tensor_descriptor(out, [N, V], [out_stride, 1], [BM, BN])
    y = tile_product(
        hidden, hidden_stride, weight, weight_stride, row_block * BM, block * BN, N, V,
        tl.where(there, H, 0), tl.zeros((BM, BN), tl.float32), False, False,
        COMPUTE, DESCRIBED, WHOLE_K, SPECIALIZED, BM, BN, BK,
    )  # fmt: skip
    columns = block * BN + tl.arange(0, BN)
    y, slope = transform(y.to(LOGITS), bias, columns[None, :], (columns < V)[None, :], logit_scale, softcap)
    m = tl.load(row_max + row)
    c = tl.load(table + Row.scale * plane + row)
    base = tl.load(table + Row.base * plane + row)
    pull = tl.load(table + Row.pull * plane + row)
    log2_p = tl.fma(
        y - m[:, None], tl.broadcast_to(c[:, None], (BM, BN)), tl.broadcast_to(base[:, None], (BM, BN))
    )
    p = tl.exp2(log2_p)
    if SPREAD:
        spread = tl.load(table + Row.spread * plane + row)
        g = p * (pull[:, None] - tl.maximum(log2_p, -150.0) * spread[:, None])  # 2**-150 is 0: not 0 * -inf
    else:
        g = p * pull[:, None]
    if TARGET:
        targets = tl.load(target_ids + row) - vocab_start
        targets = tl.where((targets >= 0) & (targets < V), targets, -1).to(tl.int32)
        at_target = tl.load(table + Row.at_target * plane + row)
        g = tl.where(columns[None, :] == targets[:, None], at_target[:, None], g)
    if softcap is not None:
        g *= slope
    if DESCRIBED:
        out.store([row_block * BM, block * BN], g.to(COMPUTE))
    else:
        place = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(out + place, g.to(COMPUTE), mask=(rows < N)[:, None] & (columns < V)[None, :])


@triton.jit(do_not_specialize=["M", "K"])
def gradient_product_kernel(
    a, a_stride: tl.int64, b, b_stride: tl.int64, M, K, columns, count, sums, out, out_rows,
    OF_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE_K: tl.constexpr, SPECIALIZED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``out = sums + a @ b``, or of the weight ``a.T @ b``, where ``a`` is the gradient of logits.

    ``count`` is of the rows of ``a``.  ``sums`` [M, columns] is fp32 or None.  Where ``out_rows`` is given,
    row r goes to ``out_rows[r]`` of ``out``, whose other rows are left as they are.
    """
    row_block, block = tile_place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(columns, BN), GROUP)
    live = tl.load(count)
    rows = row_block * BM + tl.arange(0, BM)
    column = block * BN + tl.arange(0, BN)
    if OF_WEIGHT:
        kept = rows < M
        upto = tl.minimum(live, K)
    else:
        kept = rows < tl.minimum(live, M)
        upto = tl.where(row_block * BM < live, K, 0)
    inside = kept[:, None] & (column < columns)[None, :]
    if DESCRIBED:
        if OF_WEIGHT:
            a = tl.make_tensor_descriptor(a, [K, M], [a_stride, 1], [BK, BM])
        else:
            a = tl.make_tensor_descriptor(a, [M, K], [a_stride, 1], [BM, BK])
        b = tl.make_tensor_descriptor(b, [K, columns], [b_stride, 1], [BK, BN])
    y = tl.zeros((BM, BN), tl.float32)
    if sums is not None:
        y = tl.load(sums + rows.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    y = tile_product(
        a, a_stride, b, b_stride, row_block * BM, block * BN, M, columns, upto, y, OF_WEIGHT, True,
        COMPUTE, DESCRIBED, WHOLE_K, SPECIALIZED, BM, BN, BK,
    )  # fmt: skip
    at = rows.to(tl.int64)
    if out_rows is not None:
        at = tl.load(out_rows + rows, mask=kept, other=0)
    tl.store(out + at[:, None] * columns + column[None, :], y.to(out.dtype.element_ty), mask=inside)
