"""The kernels of ``paged_prefix_attention``: the softmax of an item's rows over its pages, and the merge.

A program takes the query heads of one K/V head for as many of an item's rows as BQ places hold.  What a place
computes follows from its row and the keys alone: a block of keys that is masked gives the bits of one that
every row sees, one that no row sees changes nothing, and neither do the other places.  For this the compiler
may fuse no multiplication with an addition (``enable_fp_fusion=False``).

A state's top is a score before it is scaled, because a difference of large numbers that were rounded again
has few digits; with a softcap it is one behind it.  ``unit`` takes either to units of log 2.
"""

import triton
import triton.language as tl

from rlkernel.calls.paged_prefix_attention import ITEM
from rlkernel.triton_ops._names import Names
from rlkernel.triton_ops.logprob_kernels import LN2, LOG2E, bounded, finite_or_zero
from rlkernel.triton_ops.prefix_shared_attention_kernels import add_values

AHEAD = tl.constexpr(4)  # states of a row that the merge has on their way at once
# columns of the plan's items
Item = Names(ITEM)
ITEM_COLUMNS = tl.constexpr(len(Item))


@triton.jit
def unit(scale, softcap):
    if softcap is not None:
        return LOG2E
    else:
        return scale * LOG2E


@triton.jit
def load_paged(x, page, token, page_stride, stride, step, D: tl.constexpr, WIDTH: tl.constexpr):
    """``x[page, token, :D]`` as [len(page), WIDTH], 0 beyond D."""
    d = tl.arange(0, WIDTH)
    at = x + (page.to(tl.int64) * page_stride + token * stride)[:, None] + d[None, :] * step
    if WIDTH == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def pages_of(pages, start, first, last, PAGE: tl.constexpr, BK: tl.constexpr):
    """The pages of BK keys from position ``start`` on, of which the item has ``first`` to ``last``."""
    index = tl.minimum(tl.maximum(start + tl.arange(0, BK), first), last)
    return tl.load(pages + (index // PAGE - first // PAGE))


@triton.jit
def attend_paged(
    query, pos, k, k_page, k_stride, k_step, v, v_page, v_stride, v_step, page,
    start, first, stop, top, total, sums, scale, softcap, window,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr,
    BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the softmax with BK keys from position ``start`` on, of which the item has [first, stop)."""
    at = start + tl.arange(0, BK)
    index = at
    ok = True
    if MASKED:
        index = tl.minimum(tl.maximum(at, first), stop - 1)  # what the item does not have may be anything
        back = pos[:, None] - at[None, :]
        ok = (back >= 0) & (back < window) & (at == index)[None, :]
    token = (index % PAGE).to(tl.int64)
    key = load_paged(k, page, token, k_page, k_stride, k_step, D, WIDTH)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if softcap is not None:
        scores, _ = bounded(scores * scale, softcap)
    if MASKED:
        scores = tl.where(ok, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe, factor = finite_or_zero(new_top), unit(scale, softcap)
    p = tl.exp2((scores - safe[:, None]) * factor)
    shrink = tl.exp2((top - safe) * factor)
    value = load_paged(v, page, token, v_page, v_stride, v_step, DV, V_WIDTH)
    total = total * shrink + tl.sum(p, axis=1)
    return new_top, total, add_values(p, value, ok, shrink, sums, MASKED)


@triton.jit
def places_of(
    item, head, skipped, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, AGAIN: tl.constexpr
):
    """Of BQ places behind the item's first ``skipped`` rows: plan row, query head, state, whether it is real.

    AGAIN reads the item anew, behind the loop that takes the time, where keeping all this costs registers.
    """
    ROWS: tl.constexpr = BQ // GROUP
    begin = tl.load(item + Item.first, volatile=AGAIN) + skipped
    end = tl.load(item + Item.end, volatile=AGAIN)
    place = tl.arange(0, BQ)
    own = begin + place // GROUP
    inside = (own < end) & (place < ROWS * GROUP)
    row = tl.minimum(tl.minimum(own, begin + ROWS - 1), end - 1)  # other places repeat the last row
    member = head * GROUP + place % GROUP
    slot = tl.load(item + Item.slot, volatile=AGAIN) + skipped + row - begin
    return row, member, slot.to(tl.int64) * (KV_HEADS * GROUP) + member, inside


@triton.jit(do_not_specialize=["first_item", "wide", "tiles", "window"])
def paged_attention_kernel(
    q, q_stride: tl.int64, q_head: tl.int64,
    k, k_page: tl.int64, k_stride: tl.int64, k_head: tl.int64, k_step,
    v, v_page: tl.int64, v_stride: tl.int64, v_head: tl.int64, v_step,
    tops, totals, parts, items, rows, positions, pages, first_item, wide, tiles, scale, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, WINDOWED: tl.constexpr, PLAIN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The states ``tops``, ``totals`` [slots, Hq] and ``parts`` [slots, Hq, DV] of a launch's items."""
    # neighbours in the grid are heads of one item, whose keys lie beside each other, then its other rows,
    # which read the same keys
    head = tl.program_id(0) % KV_HEADS
    number = tl.program_id(0) // KV_HEADS
    several = number < wide * tiles
    place = tl.where(several, number // tiles, number - wide * (tiles - 1))
    skipped = tl.where(several, number % tiles, 0) * (BQ // GROUP)
    item = items + (first_item + place) * ITEM_COLUMNS
    if tl.load(item + Item.first) + skipped < tl.load(item + Item.end):
        first = tl.load(item + Item.position)
        stop = first + tl.load(item + Item.keys)
        pages += tl.load(item + Item.page)
        index, member, state, inside = places_of(item, head, skipped, KV_HEADS, GROUP, BQ, False)
        row, pos = tl.load(rows + index).to(tl.int64), tl.load(positions + index)
        d, w = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
        at_q = q + (row * q_stride + member * q_head)[:, None] + d[None, :]
        query = tl.load(at_q, mask=d[None, :] < D, other=0.0)
        k += head.to(tl.int64) * k_head
        v += head.to(tl.int64) * v_head
        carried = inside & (tl.arange(0, BQ) < tl.load(item + Item.carry) * BQ)  # all of them or none
        top = tl.load(tops + state, mask=carried, other=float("-inf"))
        total = tl.load(totals + state, mask=carried, other=0.0)
        fits = carried[:, None] & (w[None, :] < DV)
        sums = tl.load(parts + state[:, None] * DV + w[None, :], mask=fits, other=0.0)
        oldest, newest, last = tl.min(pos), tl.max(pos), stop - 1
        low = first
        if WINDOWED:
            low = tl.maximum(first, oldest - window + 1) // BK * BK
        # every row sees the keys of [plain, masked)
        plain, masked = low, low
        if PLAIN:
            masked = tl.maximum(low, tl.minimum(stop, oldest + 1) // BK * BK)
            if WINDOWED:
                plain = tl.minimum(tl.cdiv(tl.maximum(low, newest - window + 1), BK) * BK, masked)
                for start in tl.range(low, plain, BK, num_stages=EDGE):
                    top, total, sums = attend_paged(
                        query, pos, k, k_page, k_stride, k_step, v, v_page, v_stride, v_step,
                        pages_of(pages, start, first, last, PAGE, BK),
                        start, first, stop, top, total, sums, scale, softcap, window,
                        PAGE, D, WIDTH, DV, V_WIDTH, BK, True,
                    )  # fmt: skip
            # pages are read a turn ahead: what stands at an address that is loaded too is not copied ahead
            page = pages_of(pages, plain, first, last, PAGE, BK)
            for start in range(plain, masked, BK):
                following = pages_of(pages, start + BK, first, last, PAGE, BK)
                top, total, sums = attend_paged(
                    query, pos, k, k_page, k_stride, k_step, v, v_page, v_stride, v_step, page,
                    start, first, stop, top, total, sums, scale, softcap, window,
                    PAGE, D, WIDTH, DV, V_WIDTH, BK, False,
                )  # fmt: skip
                page = following
        for start in tl.range(masked, tl.minimum(stop, newest + 1), BK, num_stages=EDGE):
            top, total, sums = attend_paged(
                query, pos, k, k_page, k_stride, k_step, v, v_page, v_stride, v_step,
                pages_of(pages, start, first, last, PAGE, BK),
                start, first, stop, top, total, sums, scale, softcap, window,
                PAGE, D, WIDTH, DV, V_WIDTH, BK, True,
            )  # fmt: skip
        _, _, state, inside = places_of(item, head, skipped, KV_HEADS, GROUP, BQ, True)
        tl.store(tops + state, top, mask=inside)
        tl.store(totals + state, total, mask=inside)
        fits = inside[:, None] & (w[None, :] < DV)
        tl.store(parts + state[:, None] * DV + w[None, :], sums, mask=fits)


@triton.jit(do_not_specialize=["first_row", "T"])
def paged_merge_kernel(
    tops, totals, parts, sinks, out, lse, starts, slots, rows, first_row, T, scale, softcap,
    HEADS: tl.constexpr, DV: tl.constexpr, V_WIDTH: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """A row's results from the states of its chunks, in the order of its keys; the sinks come last."""
    BLOCKS: tl.constexpr = (HEADS + BH - 1) // BH
    plan_row = first_row + tl.program_id(0) // BLOCKS
    head = tl.program_id(0) % BLOCKS * BH + tl.arange(0, BH)
    inside = head < HEADS
    w = tl.arange(0, V_WIDTH)
    fits = inside[:, None] & (w[None, :] < DV)
    factor = unit(scale, softcap)
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    sums = tl.zeros((BH, V_WIDTH), tl.float32)
    end = tl.load(starts + plan_row + 1)
    for at in range(tl.load(starts + plan_row), end, AHEAD):
        for i in tl.static_range(AHEAD):  # what is loaded waits for no sum
            there = inside & (tl.zeros_like(head) + (at + i) < end)  # blocks, as Triton 3.9 interprets
            slot = tl.load(slots + tl.minimum(at + i, end - 1)).to(tl.int64) * HEADS + head
            found = tl.load(tops + slot, mask=there, other=float("-inf"))
            more = tl.load(totals + slot, mask=there, other=0.0)
            held = there[:, None] & (w[None, :] < DV)
            part = tl.load(parts + slot[:, None] * DV + w[None, :], mask=held, other=0.0)
            new_top = tl.maximum(top, found)
            safe = finite_or_zero(new_top)
            shrink, weight = tl.exp2((top - safe) * factor), tl.exp2((found - safe) * factor)
            total = total * shrink + more * weight
            sums = sums * shrink[:, None] + part * weight[:, None]
            top = new_top
    top *= factor
    if sinks is not None:  # a key whose value is 0
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        safe = finite_or_zero(new_top)
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.exp2(sink - safe)
        sums *= shrink[:, None]
        top = new_top
    total = tl.where(inside, total, 1.0)
    row = tl.load(rows + plan_row).to(tl.int64)
    found = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head)[:, None] * DV + w[None, :], found, mask=fits)
    tl.store(lse + head.to(tl.int64) * T + row, (top + tl.log2(total)) * LN2, mask=inside)
