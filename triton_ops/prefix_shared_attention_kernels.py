"""The kernels of ``prefix_shared_attention`` that take a tile of queries: forward, and the gradient of q.

A program visits the runs of keys that the plan lists for its tile, for one head: plain ones BK keys at a
time, masked ones STEP, because masks take registers.  Scores are in units of log 2.  Rows of q and k have D
numbers in a tile of WIDTH, rows of v and of what is made of them DV in V_WIDTH.
"""

import triton
import triton.language as tl

from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops.logprob_kernels import LN2, LOG2E, bounded, finite_or_zero
from rlkernel.triton_ops.prefix_shared_attention_plan import RUN, TILE

# columns of the plan's tables
Run = Names(RUN)
RUN_COLUMNS = tl.constexpr(len(Run))
Tile = Names(TILE)
TILE_COLUMNS = tl.constexpr(len(Tile))


@triton.jit
def load_rows(x, rows, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """``x[rows, :D]`` as [len(rows), WIDTH], 0 beyond D."""
    d = tl.arange(0, WIDTH)
    at = x + rows.to(tl.int64)[:, None] * stride + d[None, :]
    if WIDTH == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def store_rows(x, rows, stride, inside, value, D: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    at = x + rows.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def rows_of(runs, run):
    at = runs + run * RUN_COLUMNS
    return tl.load(at + Run.first), tl.load(at + Run.end)


@triton.jit
def stored_at(runs, run):
    """Where the storage holds a run: the place of its first tile, and how those of the next ones follow."""
    at = runs + run * RUN_COLUMNS
    return tl.load(at + Run.stored), tl.load(at + Run.step), tl.load(at + Run.change)


@triton.jit
def rows_of_tile(tile, ROWS: tl.constexpr):
    """The rows of a tile, or of an item, and which are its own: those beyond its end repeat the last.

    Kernels that have no registers to keep these in, nor their address, read them anew behind the loop that
    takes the time, from a second argument that is the same table.
    """
    index = tl.load(tile + Tile.first) + tl.arange(0, ROWS)
    end = tl.load(tile + Tile.end)
    return tl.minimum(index, end - 1), index < end


@triton.jit
def finite(x):
    """What is not finite replaced by 0: a pair that is masked multiplies it, and 0 * NaN is NaN."""
    return tl.where(x - x == 0.0, x, 0.0)


@triton.jit
def scored(products, scale, softcap):
    """The scores, and the derivative of the softcap (unused without one)."""
    if softcap is not None:
        scores, slope = bounded(products * scale, softcap)
        scores *= LOG2E
    else:
        scores = products * (scale * LOG2E)
        slope = scores
    return scores, slope


@triton.jit
def load_tables(first, last, pos, rows):
    return tl.load(first + rows), tl.load(last + rows), tl.load(pos + rows)


@triton.jit
def sees(first_i, pos_i, first_j, last_j, pos_j, window):
    """Whether row i sees row j: ``PrefixLayout.row_tables``."""
    back = pos_i - pos_j
    return (first_j <= first_i) & (first_i < last_j) & (back >= 0) & (back < window)


@triton.jit
def key_rows(keys, start, end, BK: tl.constexpr):
    """The rows of a block of keys; those beyond the end repeat the last."""
    index = tl.minimum(start + tl.arange(0, BK), end - 1)
    if keys is None:
        return index
    else:
        return tl.load(keys + index)


@triton.jit
def masked_keys(keys, start, end, first, last, pos, first_i, pos_i, window, BK: tl.constexpr):
    """The rows of a block of keys, and which of them each query sees."""
    rows = key_rows(keys, start, end, BK)
    first_j, last_j, pos_j = load_tables(first, last, pos, rows)
    ok = sees(first_i[:, None], pos_i[:, None], first_j[None, :], last_j[None, :], pos_j[None, :], window)
    return rows, ok & (start + tl.arange(0, BK) < end)[None, :]


@triton.jit
def attend(
    query, k, k_stride, v, v_stride, rows, ok, top, total, sums, scale, softcap,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the softmax of a tile's rows with a block of keys."""
    key = load_rows(k, rows, k_stride, D, WIDTH)
    scores, _ = scored(tl.dot(query, tl.trans(key), input_precision="ieee"), scale, softcap)
    if MASKED:
        scores = tl.where(ok, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = finite_or_zero(new_top)
    p = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    value = load_rows(v, rows, v_stride, DV, V_WIDTH)
    total = total * shrink + tl.sum(p, axis=1)
    return new_top, total, add_values(p, value, ok, shrink, sums, MASKED)


@triton.jit
def add_values(p, value, ok, shrink, sums, MASKED: tl.constexpr):
    """``sums``, shrunk, and a block's values with their weights p."""
    if MASKED:  # rows that see a value which is not finite get NaN from its weight, others nothing
        not_finite = tl.sum((value - value).to(tl.float32), axis=1)
        p = tl.where(ok, p + not_finite[None, :], 0.0)
        value = finite(value)
    return tl.dot(p.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["T", "window"])
def attention_forward_kernel(
    q, q_stride: tl.int64, q_head: tl.int64, k, k_stride: tl.int64, k_head: tl.int64,
    v, v_stride: tl.int64, v_head: tl.int64, sinks, out, lse,
    tiles, runs, keys, first, last, pos, T, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    DV: tl.constexpr, V_WIDTH: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # neighbours in the grid are heads of one tile, which find the keys in the cache
    head = tl.program_id(0) % HEADS
    tile = tiles + tl.program_id(0) // HEADS * TILE_COLUMNS
    plain, masked, stop = tl.load(tile + Tile.plain), tl.load(tile + Tile.masked), tl.load(tile + Tile.stop)
    q += head.to(tl.int64) * q_head
    k += (head // GROUP).to(tl.int64) * k_head
    v += (head // GROUP).to(tl.int64) * v_head
    i, inside = rows_of_tile(tile, BQ)
    query = load_rows(q, i, q_stride, D, WIDTH)
    first_i, _, pos_i = load_tables(first, last, pos, i)
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    if sinks is not None:  # a key whose value is 0
        top = tl.zeros((BQ,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    sums = tl.zeros((BQ, V_WIDTH), tl.float32)
    if keys is None:
        for run in range(plain, masked):
            run_first, run_end = rows_of(runs, run)
            for start in range(run_first, run_end, BK):
                rows = start + tl.arange(0, BK)
                top, total, sums = attend(
                    query, k, k_stride, v, v_stride, rows, True, top, total, sums, scale, softcap,
                    D, WIDTH, DV, V_WIDTH, False,
                )  # fmt: skip
    for run in range(masked, stop):
        run_first, run_end = rows_of(runs, run)
        for start in range(run_first, run_end, STEP):
            rows, ok = masked_keys(keys, start, run_end, first, last, pos, first_i, pos_i, window, STEP)
            top, total, sums = attend(
                query, k, k_stride, v, v_stride, rows, ok, top, total, sums, scale, softcap,
                D, WIDTH, DV, V_WIDTH, True,
            )  # fmt: skip
    out += head.to(tl.int64) * DV
    store_rows(out, i, HEADS * DV, inside, sums / total[:, None], DV, V_WIDTH)
    lse += head.to(tl.int64) * T
    tl.store(lse + i, (top + tl.log2(total)) * LN2, mask=inside)


@triton.jit(do_not_specialize=["T"])
def attention_delta_kernel(
    grad_out, g_stride: tl.int64, g_head: tl.int64, out, delta, T,
    HEADS: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``delta`` [H, T]: the sum of ``grad_out * out`` of a row."""
    head = tl.program_id(0) % HEADS
    index = tl.program_id(0) // HEADS * ROWS + tl.arange(0, ROWS)
    i = tl.minimum(index, T - 1)
    g = load_rows(grad_out + head.to(tl.int64) * g_head, i, g_stride, DV, V_WIDTH)
    o = load_rows(out + head.to(tl.int64) * DV, i, HEADS * DV, DV, V_WIDTH)
    total = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta + head.to(tl.int64) * T + i, total, mask=index < T)


@triton.jit
def pull(
    query, g, lse, delta, k, k_stride, v, v_stride, rows, ok, sums, scale, softcap,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of a tile's queries what a block of keys gives."""
    key = load_rows(k, rows, k_stride, D, WIDTH)
    value = load_rows(v, rows, v_stride, DV, V_WIDTH)
    if MASKED:  # rows that see a key which is not finite have no finite lse
        key = finite(key)
    scores, slope = scored(tl.dot(query, tl.trans(key), input_precision="ieee"), scale, softcap)
    p = tl.exp2(scores - lse[:, None])
    ds = p * (tl.dot(g, tl.trans(value), input_precision="ieee") - delta[:, None])
    if softcap is not None:
        ds *= slope
    if MASKED:
        ds = tl.where(ok, ds, 0.0)
    return tl.dot(ds.to(key.dtype), key, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "window", "first_head", "first_tile", "stored_rows"])
def attention_query_grad_kernel(
    q, q_stride: tl.int64, q_head: tl.int64, k, k_stride: tl.int64, k_head: tl.int64,
    v, v_stride: tl.int64, v_head: tl.int64, grad_out, g_stride: tl.int64, g_head: tl.int64,
    lse, delta, dq, tiles, tiles_again, runs, first, last, pos, T, scale, softcap, window,
    first_head, first_tile, stored, stored_rows, STORED_KEYS: tl.constexpr, STORED_STAGES: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    DV: tl.constexpr, V_WIDTH: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head, number = tl.program_id(0), tl.program_id(1)
    if stored is not None:
        head, number = head + first_head, number + first_tile
    tile = tiles + number * TILE_COLUMNS
    plain, masked, stop = tl.load(tile + Tile.plain), tl.load(tile + Tile.masked), tl.load(tile + Tile.stop)
    q += head.to(tl.int64) * q_head
    grad_out += head.to(tl.int64) * g_head
    k += (head // GROUP).to(tl.int64) * k_head
    v += (head // GROUP).to(tl.int64) * v_head
    lse += head.to(tl.int64) * T
    delta += head.to(tl.int64) * T
    sums = tl.zeros((BQ, WIDTH), tl.float32)
    if stored is not None:
        for run in range(plain, masked):
            run_first, run_end = rows_of(runs, run)
            place, step, change = stored_at(runs, run)
            place += stored_rows * tl.program_id(0)
            for start in tl.range(run_first, run_end, BK, num_stages=STORED_STAGES):
                n = (start - run_first) // STORED_KEYS
                row = place + n * step + n * (n - 1) // 2 * change
                ds = stored.load([row, (start - run_first) % STORED_KEYS])
                key = load_rows(k, start + tl.arange(0, BK), k_stride, D, WIDTH)
                sums = tl.dot(ds, key, sums, input_precision="ieee")
    i, inside = rows_of_tile(tile, BQ)
    query = load_rows(q, i, q_stride, D, WIDTH)
    g = load_rows(grad_out, i, g_stride, DV, V_WIDTH)
    lse_i, delta_i = tl.load(lse + i) * LOG2E, tl.load(delta + i)
    if stored is None:
        for run in range(plain, masked):
            run_first, run_end = rows_of(runs, run)
            for start in range(run_first, run_end, BK):
                rows = start + tl.arange(0, BK)
                sums = pull(
                    query, g, lse_i, delta_i, k, k_stride, v, v_stride, rows, True, sums, scale, softcap,
                    D, WIDTH, DV, V_WIDTH, False,
                )  # fmt: skip
    i, inside = rows_of_tile(tiles_again + number * TILE_COLUMNS, BQ)
    lse_i, delta_i = tl.load(lse + i) * LOG2E, tl.load(delta + i)
    first_i, _, pos_i = load_tables(first, last, pos, i)
    for run in range(masked, stop):
        run_first, run_end = rows_of(runs, run)
        for start in range(run_first, run_end, STEP):
            rows, ok = masked_keys(None, start, run_end, first, last, pos, first_i, pos_i, window, STEP)
            sums = pull(
                query, g, lse_i, delta_i, k, k_stride, v, v_stride, rows, ok, sums, scale, softcap,
                D, WIDTH, DV, V_WIDTH, True,
            )  # fmt: skip
    store_rows(dq + head.to(tl.int64) * D, i, HEADS * D, inside, sums * scale, D, WIDTH)
