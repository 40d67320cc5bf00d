"""``paged_prefix_attention`` over Triton: the launches of a step's plan, and after each pass its merge.

How many rows and keys are multiplied at a time follows from head dims and dtype, never from the step, so a
row has the same bits alone and in any group.  Memory besides the results is what the plan's slots take.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedCall, PagedResults
from rlkernel.triton_ops._device import tensor_reasons
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.paged_prefix_attention_kernels import paged_attention_kernel, paged_merge_kernel

MAX_HEAD_DIM = 256
NO_WINDOW = 2**31 - 1


class Blocks(NamedTuple):
    """Places of rows and heads, and keys, that are multiplied at a time; how a program runs."""

    q: int
    k: int  # divides TILE, of which keys are shared in whole
    warps: int
    stages: int


# (bytes of a number, wider head dim): the largest found that spill on none of sm_80, sm_90 and sm_100, and on
# gfx942, whose shared memory has 64 KiB.  fp32 is exact, which on NVIDIA means ordinary multiply-adds.
NVIDIA = {
    (2, 64): Blocks(64, 32, 4, 3),
    (2, 128): Blocks(64, 32, 4, 3),
    (2, 256): Blocks(64, 16, 8, 3),
    (4, 64): Blocks(16, 32, 8, 3),
    (4, 128): Blocks(16, 32, 8, 2),
    (4, 256): Blocks(16, 16, 8, 2),
}
AMD = {
    (2, 64): Blocks(64, 64, 4, 2),
    (2, 128): Blocks(64, 32, 4, 2),
    (2, 256): Blocks(32, 32, 8, 2),
    (4, 64): Blocks(32, 32, 8, 1),
    (4, 128): Blocks(16, 32, 8, 1),
    (4, 256): Blocks(16, 16, 8, 1),
}
# multi-head latent attention's (192, 128) on NVIDIA
NARROW_VALUES = {(2, 256, 128): Blocks(64, 32, 4, 3)}


def unsupported(query: Tensor, *tensors: Tensor, **options: object) -> list[str]:
    reasons = tensor_reasons("query", query)
    if reasons or len(tensors) < 2:
        return reasons
    key_cache, value_cache, *_ = tensors
    for name, x in (("key_cache", key_cache), ("value_cache", value_cache)):
        if x.shape[3] > MAX_HEAD_DIM:
            reasons.append(f"the head dim of {name} must be at most {MAX_HEAD_DIM}, got {x.shape[3]}")
    if not reasons:
        most, group = _blocks(query, value_cache).q, query.shape[1] // key_cache.shape[2]
        if group > most:
            reasons.append(f"query heads of a K/V head must be at most {most}, got {group}")
    return reasons


def forward(call: PagedCall) -> PagedResults:
    query, key_cache, value_cache, _, _, _, plan, rule, sinks = call
    total, heads, d = query.shape
    _, page, kv_heads, dv = value_cache.shape
    device, group = query.device, heads // kv_heads
    sinks = None if sinks is None else sinks.contiguous()
    out = torch.empty(total, heads, dv, dtype=query.dtype, device=device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=device)
    blocks = _blocks(query, value_cache)
    half = query.dtype.itemsize == 2
    # in fp32 the page of every single key takes registers that copies ahead would need
    stages = 1 if page == 1 and not half else blocks.stages
    # masked blocks are rare and take fewer registers without copies ahead; ordinary multiply-adds want them
    edge = 1 if half else stages
    shape = plan.slot_count, heads
    tops, totals = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    parts = torch.empty(*shape, dv, dtype=torch.float32, device=device)
    v_width = _width(dv)
    merged = max(1, 512 // v_width)
    with torch.cuda.device_of(query):
        for launch, widths in zip(plan.launches.tolist(), plan.widths.tolist(), strict=True):
            first_item, end_item, first_row, end_row = launch
            wide_items, most_rows = widths
            wide, tiles, programs = spread(end_item - first_item, wide_items, most_rows, blocks.q // group)
            paged_attention_kernel[(programs * kv_heads,)](
                query, *query.stride()[:2], key_cache, *key_cache.stride(),
                value_cache, *value_cache.stride(), tops, totals, parts, plan.items,
                plan.rows, plan.positions, plan.pages, first_item, wide, tiles, rule.scale,
                rule.softcap or None, rule.window or NO_WINDOW,
                KV_HEADS=kv_heads, GROUP=group, PAGE=page, D=d, WIDTH=_width(d), DV=dv, V_WIDTH=v_width,
                BQ=blocks.q, BK=blocks.k, WINDOWED=rule.window > 0,
                PLAIN=half or not rule.window, EDGE=edge,
                num_warps=blocks.warps, num_stages=stages, enable_fp_fusion=False,
            )  # fmt: skip
            if first_row < end_row:
                paged_merge_kernel[((end_row - first_row) * cdiv(heads, merged),)](
                    tops, totals, parts, sinks, out, lse, plan.starts, plan.slots, plan.rows,
                    first_row, total, rule.scale, rule.softcap or None,
                    HEADS=heads, DV=dv, V_WIDTH=v_width, BH=merged, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
    return PagedResults(out, lse)


def spread(items: int, wide: int, most_rows: int, rows: int) -> tuple[int, int, int]:
    """How many items of a launch take several programs of ``rows`` rows, how many each, and all programs."""
    tiles = cdiv(most_rows, rows)
    if tiles == 1:
        wide = 0
    return wide, tiles, items + wide * (tiles - 1)


def _width(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _blocks(query: Tensor, value_cache: Tensor) -> Blocks:
    widths = _width(query.shape[2]), _width(value_cache.shape[3])
    size = query.dtype.itemsize
    if torch.version.hip is not None:
        return AMD[size, max(64, *widths)]
    return NARROW_VALUES.get((size, *widths), NVIDIA[size, max(64, *widths)])
