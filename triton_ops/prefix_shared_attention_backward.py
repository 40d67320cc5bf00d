"""The backward pass of ``prefix_shared_attention`` over Triton: no atomics, every sum in a fixed order.

A kernel for the gradient of q and one for those of k and v, and one that adds up what several programs found
for one tile of keys.

| | products of tiles | bytes of each pair beside them |
|---|---|---|
| both compute the scores and their gradient | 7 | |
| the first reads gradients of scores that the second has stored | 5 | 4, in 16 bits |

FlashAttention takes 5 and adds to the gradient of q in whatever order its programs end.  Stored are the plain
runs of whole tiles of keys, in the workspace, for as many heads at a time as its limit has room for; on GPUs
that copy tiles by descriptors, since the rows of a run begin anywhere, and where it is asked for: none has
run it yet (``trials``).  Memory besides the results is delta [Hq, T] and fp32 partial sums: beside what is
stored in the workspace, else at most ``PARTIAL_BYTES``.
"""

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionGrads, AttentionResults, OutGrads
from rlkernel.runtime import trials, workspace
from rlkernel.runtime.workspace import Carver
from rlkernel.triton_ops import prefix_shared_attention_blocks as launch
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops._tiles import leased
from rlkernel.triton_ops.prefix_shared_attention_backward_kernels import (
    attention_key_grad_kernel,
    attention_sum_kernel,
)
from rlkernel.triton_ops.prefix_shared_attention_kernels import (
    attention_delta_kernel,
    attention_query_grad_kernel,
)
from rlkernel.triton_ops.prefix_shared_attention_plan import KeyPlan, QueryPlan, key_plan
from rlkernel.triton_ops.prefix_shared_attention_stored_plan import Sizes, StoredPlan, stored_plan

# (generation, bytes of a number, head dims of q and of v, 64 at least) that store gradients of scores: where
# two products of such heads take longer than the bytes, and where the kernel has registers for it
STORING = {(9, 2, 128, 128)}


STAGES = 4  # of the loop over what is stored, which waits for memory
# of a grid's second dimension, which CUDA bounds by 65535.  This many rows of any of the tables are whole
# 16 bytes, so that a table of which they are left out is as aligned as before.
MOST_PROGRAMS = 65532


class Rows(NamedTuple):
    """What backward reads of a row besides q."""

    lse: Tensor  # [Hq, T]
    delta: Tensor  # [Hq, T], of out and its gradient
    grad_out: Tensor


class Round(NamedTuple):
    """The heads of keys of some launches, and their memory."""

    first: int
    heads: int
    parts: tuple[Tensor, ...]  # partial sums of keys and of values
    stored: Tensor | None = None  # gradients of scores: [rows of one head of queries after the other, keys]
    rows: int = 0  # for each head of queries

    def described(self, block: list[int]) -> TensorDescriptor | None:
        return None if self.stored is None else TensorDescriptor.from_tensor(self.stored, block)


class Span(NamedTuple):
    """Which items of keys, and which tiles of queries, a launch takes."""

    first: int
    end: int

    def launches(self, programs: int = 1) -> "Iterator[Span]":
        """In as many launches as it takes, of so many programs for an item or a tile."""
        step = MOST_PROGRAMS // programs
        return (Span(x, min(x + step, self.end)) for x in range(self.first, self.end, step))


def one_pass_backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    (out, lse), (grad_out,) = results, grads
    total, heads, v_dim = out.shape
    found = AttentionGrads(
        *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    )
    if not total:
        return found
    if grad_out.stride(2) != 1:  # of a sum, which is expanded from one number
        grad_out = grad_out.contiguous()
    out = out.contiguous()
    with torch.cuda.device_of(out):
        delta = torch.empty_like(lse)
        rows = 4096 // max(64, launch.width_of(v_dim))
        attention_delta_kernel[(cdiv(total, rows) * heads,)](
            *launch.strided(grad_out), out, delta, total,
            HEADS=heads, DV=v_dim, V_WIDTH=launch.width_of(v_dim), ROWS=rows, num_warps=4,
        )  # fmt: skip
        of_rows = Rows(lse, delta, grad_out)
        kv_heads, plan = call.k.shape[1], _stored_plan(call)
        if plan is None:
            keys, queries = _key_plan(call), _query_plan(call)
            shapes = _parts(call, keys.slots, kv_heads)
            parts = tuple(torch.empty(*x, dtype=torch.float32, device=out.device) for x in shapes)
            _gradients(call, of_rows, found, Round(0, kv_heads, parts), keys, queries)
            return found
        with leased(functools.partial(_carve, call, plan), out.device) as (stored, parts):
            for first in range(0, kv_heads, plan.heads):
                heads_of_round = Round(first, plan.heads, parts, stored, plan.rows)
                _gradients(call, of_rows, found, heads_of_round, plan.keys, plan.queries)
    return found


def _gradients(
    call: AttentionCall, of_rows: Rows, found: AttentionGrads, heads: Round, keys: KeyPlan, queries: QueryPlan
) -> None:
    spans = (pairwise([0, *plan.spans]) for plan in (keys, queries))
    for of_keys, of_queries in zip(*spans, strict=True):
        _key_grads(call, of_rows, found, heads, keys, Span(*of_keys))
        _query_grad(call, of_rows, found, heads, queries, Span(*of_queries))
    _sums(call, found, heads, keys)


def _blocks(call: AttentionCall, kernel: str) -> launch.Blocks:
    return launch.blocks_of(kernel, (call.q.shape[2], call.v.shape[2]), call.q.dtype, call.rule)


def _query_plan(call: AttentionCall) -> QueryPlan:
    blocks, rule = _blocks(call, "query grad"), call.rule._replace(bitwise=False)
    return launch.query_plan_of(call.layout, rule, blocks, call.q.device)


def _key_plan(call: AttentionCall) -> KeyPlan:
    blocks, window, slot = _blocks(call, "key grad"), call.rule.window, _slot(call) * call.k.shape[1]
    plan: KeyPlan = call.layout._on(
        call.q.device,
        f"triton keys {blocks.q} {blocks.k} {slot} {window}",
        lambda: key_plan(call.layout, window, blocks.q, blocks.k, slot),
    )
    return plan


def _stored_plan(call: AttentionCall) -> StoredPlan | None:
    widths = (max(64, launch.width_of(x.shape[2])) for x in (call.q, call.v))
    if not trials.stores_scores() or (launch.generation(), call.q.element_size(), *widths) not in STORING:
        return None
    q, k, layout, window = call.q, call.k, call.layout, call.rule.window
    of_queries, of_keys = _blocks(call, "query grad"), _blocks(call, "key grad")
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    sizes = Sizes(of_keys.k * q.element_size() * group, _slot(call), workspace.limit(q.device))
    plan: StoredPlan = layout._on(
        q.device,
        f"triton stored {of_queries[:2]} {of_keys[:2]} {heads} {sizes} {window}",
        lambda: stored_plan(layout, window, of_queries[:2], of_keys[:2], heads, sizes),
    )
    return plan if plan.heads else None


def _slot(call: AttentionCall) -> int:
    """Bytes of a partial sum of keys and of values, for each of their heads."""
    return 4 * _blocks(call, "key grad").k * (call.k.shape[2] + call.v.shape[2])


def _parts(call: AttentionCall, slots: int, heads: int) -> list[tuple[int, int]]:
    """Shapes of the fp32 partial sums of keys and of values."""
    rows = slots * heads * _blocks(call, "key grad").k
    return [(rows, call.k.shape[2]), (rows, call.v.shape[2])]


def _carve(call: AttentionCall, plan: StoredPlan, carver: Carver) -> tuple[Tensor, tuple[Tensor, ...]]:
    heads, keys = call.q.shape[1] // call.k.shape[1] * plan.heads, _blocks(call, "key grad").k
    stored = carver.part(heads * plan.rows, keys, dtype=call.q.dtype)
    shapes = _parts(call, plan.slots, plan.heads)
    return stored, tuple(carver.part(*shape, dtype=torch.float32) for shape in shapes)


def _query_grad(
    call: AttentionCall, of_rows: Rows, found: AttentionGrads, heads: Round, plan: QueryPlan, span: Span
) -> None:
    q, k, v, layout, rule, *_ = call
    lse, delta, grad_out = of_rows
    blocks, group = _blocks(call, "query grad"), q.shape[1] // k.shape[1]
    for part in span.launches():
        # the kernel that reads nothing stored begins with the first tile that it is given
        first = 0 if heads.stored is None else part.first
        tiles = plan.tiles[part.first - first :]
        attention_query_grad_kernel[heads.heads * group, part.end - part.first](
            *launch.strided(q), *launch.strided(k), *launch.strided(v), *launch.strided(grad_out),
            lse, delta, found.q, tiles, tiles, plan.runs, *layout.row_tables(q.device), len(q),
            *launch.numbers(rule), heads.first * group, first,
            heads.described([blocks.q, blocks.k]), heads.rows,
            STORED_KEYS=0 if heads.stored is None else heads.stored.shape[1], STORED_STAGES=STAGES,
            HEADS=q.shape[1], GROUP=group, **launch.shape_of((q.shape[2], v.shape[2]), blocks, blocks.k),
        )  # fmt: skip


def _key_grads(
    call: AttentionCall, of_rows: Rows, found: AttentionGrads, heads: Round, plan: KeyPlan, span: Span
) -> None:
    q, k, v, layout, rule, *_ = call
    lse, delta, grad_out = of_rows
    blocks, kv_heads = _blocks(call, "key grad"), k.shape[1]
    for part in span.launches():
        attention_key_grad_kernel[heads.heads, part.end - part.first](
            *launch.strided(q), *launch.strided(k), *launch.strided(v), *launch.strided(grad_out),
            lse, delta, found.k, found.v, *heads.parts, plan.slots, plan.items, plan.items, plan.runs,
            *layout.row_tables(q.device), len(q), *launch.numbers(rule), heads.first, part.first,
            heads.described([blocks.q, blocks.k]), heads.rows,
            KV_HEADS=kv_heads, GROUP=q.shape[1] // kv_heads,
            **launch.shape_of((k.shape[2], v.shape[2]), blocks, blocks.q),
        )  # fmt: skip


def _sums(call: AttentionCall, found: AttentionGrads, heads: Round, plan: KeyPlan) -> None:
    block, factors = _blocks(call, "key grad").k, (call.rule.scale, 1.0)
    for part, grad, factor in zip(heads.parts, found[1:], factors, strict=True):
        dim = part.shape[1]
        rows = min(16, 2048 // launch.width_of(dim))
        pieces = block // rows
        for tiles in Span(0, len(plan.sums)).launches(pieces):
            attention_sum_kernel[heads.heads, (tiles.end - tiles.first) * pieces](
                part, plan.slots, grad, plan.sums[tiles.first :], heads.first, factor,
                KV_HEADS=grad.shape[1], D=dim, WIDTH=launch.width_of(dim), BK=block, ROWS=rows, num_warps=4,
            )  # fmt: skip
