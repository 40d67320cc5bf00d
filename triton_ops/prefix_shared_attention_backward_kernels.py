"""The kernels of ``prefix_shared_attention`` that take a tile of keys: the gradients of k and v.

A program visits the runs of queries that the plan lists for its item, in their order, for one head after
another of those that read these keys: first all plain runs, then all masked ones.  Nothing is added to
memory: sums that several programs make go to slots of their own, which a second kernel adds up in order.
Where the gradients of the scores of plain runs are STORED, the gradient of q is made of these.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops.logprob_kernels import LOG2E
from rlkernel.triton_ops.prefix_shared_attention_kernels import (
    finite,
    load_rows,
    load_tables,
    rows_of,
    rows_of_tile,
    scored,
    sees,
    store_rows,
    stored_at,
)
from rlkernel.triton_ops.prefix_shared_attention_plan import ITEM, SUM

# columns of the plan's tables
Item = Names(ITEM)
ITEM_COLUMNS = tl.constexpr(len(Item))
Sum = Names(SUM)
SUM_COLUMNS = tl.constexpr(len(Sum))


@triton.jit
def push(
    key, value, q, q_stride, grad_out, g_stride, lse, delta, rows, ok, dk, dv, scale, softcap,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile's keys and values what a block of queries gives."""
    query = load_rows(q, rows, q_stride, D, WIDTH)
    g = load_rows(grad_out, rows, g_stride, DV, V_WIDTH)
    lse_i, delta_i = tl.load(lse + rows) * LOG2E, tl.load(delta + rows)
    if MASKED:  # a row whose query or gradient is not finite has no finite lse or delta
        query, g = finite(query), finite(g)
        lse_i, delta_i = lse_i + (delta_i - delta_i), finite(delta_i)
    scores, slope = scored(tl.dot(key, tl.trans(query), input_precision="ieee"), scale, softcap)
    p = tl.exp2(scores - lse_i[None, :])
    if MASKED:
        p = tl.where(ok, p, 0.0)
    dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
    ds = p * (tl.dot(value, tl.trans(g), input_precision="ieee") - delta_i[None, :])
    if softcap is not None:
        ds *= slope
    ds = ds.to(query.dtype)
    return tl.dot(ds, query, dk, input_precision="ieee"), dv, ds


@triton.jit
def begun(part, to, goes_on, BK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The sums that an item of an earlier span left in a slot, else 0."""
    d = tl.arange(0, WIDTH)
    at = part + (to + tl.arange(0, BK))[:, None] * D + d[None, :]
    return tl.load(at, mask=(d < tl.where(goes_on, D, 0))[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "window", "first_head", "first_item", "slots", "stored_rows"])
def attention_key_grad_kernel(
    q, q_stride: tl.int64, q_head: tl.int64, k, k_stride: tl.int64, k_head: tl.int64,
    v, v_stride: tl.int64, v_head: tl.int64, grad_out, g_stride: tl.int64, g_head: tl.int64,
    lse, delta, dk, dv, part_dk, part_dv, slots, items, items_again, runs, first, last, pos, T,
    scale, softcap, window, first_head, first_item, stored, stored_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    DV: tl.constexpr, V_WIDTH: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    kv_head = first_head + tl.program_id(0)
    item = items + (first_item + tl.program_id(1)) * ITEM_COLUMNS
    plain, masked, stop = tl.load(item + Item.plain), tl.load(item + Item.masked), tl.load(item + Item.stop)
    j, inside = rows_of_tile(item, BK)
    key = load_rows(k + kv_head.to(tl.int64) * k_head, j, k_stride, D, WIDTH)
    value = load_rows(v + kv_head.to(tl.int64) * v_head, j, v_stride, DV, V_WIDTH)
    if stored is not None:
        goes_on = tl.load(item + Item.goes_on) > 0
        to = (tl.program_id(0) * slots + tl.load(item + Item.slot)).to(tl.int64) * BK
        sum_dk = begun(part_dk, to, goes_on, BK, D, WIDTH)
        sum_dv = begun(part_dv, to, goes_on, BK, DV, V_WIDTH)
    else:  # all queries are one span
        sum_dk = tl.zeros((BK, WIDTH), tl.float32)
        sum_dv = tl.zeros((BK, V_WIDTH), tl.float32)
    # all plain runs, then all masked ones: masks take registers, which the first loop has none to spare of
    for member in range(GROUP):
        head = (kv_head * GROUP + member).to(tl.int64)
        q_here, g_here = q + head * q_head, grad_out + head * g_head
        lse_here, delta_here = lse + head * T, delta + head * T
        for run in range(plain, masked):
            run_first, run_end = rows_of(runs, run)
            if stored is not None:
                place = (
                    (tl.program_id(0) * GROUP + member) * stored_rows + stored_at(runs, run)[0] - run_first
                )
            for start in range(run_first, run_end, BQ):
                rows = start + tl.arange(0, BQ)
                sum_dk, sum_dv, ds = push(
                    key, value, q_here, q_stride, g_here, g_stride, lse_here, delta_here, rows, True,
                    sum_dk, sum_dv, scale, softcap, D, WIDTH, DV, V_WIDTH, False,
                )  # fmt: skip
                if stored is not None:
                    stored.store([place + start, 0], ds.T)
    item = items_again + (first_item + tl.program_id(1)) * ITEM_COLUMNS
    j, inside = rows_of_tile(item, BK)
    first_j, last_j, pos_j = load_tables(first, last, pos, j)
    for member in range(GROUP):
        head = (kv_head * GROUP + member).to(tl.int64)
        q_here, g_here = q + head * q_head, grad_out + head * g_head
        lse_here, delta_here = lse + head * T, delta + head * T
        for run in range(masked, stop):
            run_first, run_end = rows_of(runs, run)
            for start in range(run_first, run_end, STEP):
                rows = tl.minimum(start + tl.arange(0, STEP), run_end - 1)
                first_i, _, pos_i = load_tables(first, last, pos, rows)
                ok = sees(
                    first_i[None, :],
                    pos_i[None, :],
                    first_j[:, None],
                    last_j[:, None],
                    pos_j[:, None],
                    window,
                )
                ok &= (start + tl.arange(0, STEP) < run_end)[None, :]
                sum_dk, sum_dv, _ = push(
                    key, value, q_here, q_stride, g_here, g_stride, lse_here, delta_here, rows, ok,
                    sum_dk, sum_dv, scale, softcap, D, WIDTH, DV, V_WIDTH, True,
                )  # fmt: skip
    slot = tl.load(item + Item.slot)
    if slot < 0:
        store_rows(dk + kv_head.to(tl.int64) * D, j, KV_HEADS * D, inside, sum_dk * scale, D, WIDTH)
        store_rows(dv + kv_head.to(tl.int64) * DV, j, KV_HEADS * DV, inside, sum_dv, DV, V_WIDTH)
    else:
        to = (tl.program_id(0) * slots + slot).to(tl.int64) * BK
        store_rows(part_dk + to * D, tl.arange(0, BK), D, inside, sum_dk, D, WIDTH)
        store_rows(part_dv + to * DV, tl.arange(0, BK), DV, inside, sum_dv, DV, V_WIDTH)


@triton.jit(do_not_specialize=["first_head", "slots"])
def attention_sum_kernel(
    part, slots, out, sums, first_head, factor,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the slots of a tile, ROWS rows of them; ``part`` [heads of the grid, slots, BK, D]."""
    PIECES: tl.constexpr = BK // ROWS
    tile = sums + tl.program_id(1) // PIECES * SUM_COLUMNS
    n = tl.program_id(1) % PIECES * ROWS + tl.arange(0, ROWS)
    j = tl.load(tile + Sum.first) + n
    inside = j < tl.load(tile + Sum.end)
    n = tl.where(inside, n, 0)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for slot in range(tl.load(tile + Sum.begin), tl.load(tile + Sum.stop)):
        at = part + tl.cast(tl.program_id(0) * slots + slot, tl.int64) * (BK * D)
        total += load_rows(at, n, D, D, WIDTH)
    out += (first_head + tl.program_id(0)).to(tl.int64) * D
    store_rows(out, j, KV_HEADS * D, inside, total * factor, D, WIDTH)
