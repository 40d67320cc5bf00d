"""``prefix_shared_attention`` over Triton: one pass forward, no merge, no copies of shared keys.

On a GPU that has a vendor's flash kernels and not the compiled ones around them, it takes the vendor's, with
Triton's around them: ``prefix_shared_attention_flash``.  The rest of this file is about its own.

Backward has a kernel for the gradient of q and one for those of k and v, both without atomics, and one that
adds up what several programs found for one tile of keys.  That takes 7 products of tiles where
FlashAttention takes 5: the price of a fixed order.  Memory besides the results is delta [Hq, T] and fp32
partial sums, at most ``PARTIAL_BYTES`` whatever the lengths.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.triton_ops import prefix_shared_attention_flash as flash
from rlkernel.triton_ops._device import dense_reasons, generation, tensor_reasons
from rlkernel.triton_ops.prefix_shared_attention_backward_kernels import (
    attention_key_grad_kernel,
    attention_sum_kernel,
)
from rlkernel.triton_ops.prefix_shared_attention_kernels import (
    attention_delta_kernel,
    attention_forward_kernel,
    attention_query_grad_kernel,
)
from rlkernel.triton_ops.prefix_shared_attention_plan import (
    KeyPlan,
    QueryPlan,
    key_plan,
    logical_plan,
    query_plan,
)

MAX_HEAD_DIM = 256
NO_WINDOW = 2**31 - 1


class Blocks(NamedTuple):
    """Rows of queries and of keys that are multiplied at a time, and how a program runs.

    The first two decide the order of sums: they follow from head dims, dtype and rule, and from the vendor
    and its generation of tensor cores, whose sums differ anyway; never from how many processors a card has.
    """

    q: int
    k: int
    warps: int
    stages: int


# (bytes of a number, wider head dim) -> blocks of each of KERNELS: the largest found that spill on none of
# sm_80, sm_90, sm_100 and gfx942, in shared memory that all of them have (AMD: 64 KiB; its four warps have
# twice the registers of eight).  tests/test_triton_codegen.py compiles some of them; with a softcap, or at
# head dims between these, a few spill on one of the four.  fp32 is exact: multiply-adds on NVIDIA.
KERNELS = ("forward", "query grad", "key grad")
NVIDIA = {
    (2, 64): (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2), Blocks(64, 128, 8, 2)),
    (2, 128): (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2)),
    (2, 256): (Blocks(64, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2)),
    (4, 64): (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    (4, 128): (Blocks(64, 16, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 2)),
    (4, 256): (Blocks(16, 16, 8, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}
AMD = {
    (2, 64): (Blocks(128, 64, 4, 2), Blocks(128, 32, 4, 2), Blocks(32, 128, 4, 2)),
    (2, 128): (Blocks(128, 64, 4, 2), Blocks(128, 32, 4, 2), Blocks(32, 64, 4, 2)),
    (2, 256): (Blocks(64, 32, 4, 2), Blocks(64, 16, 4, 2), Blocks(16, 32, 4, 2)),
    (4, 64): (Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 1)),
    (4, 128): (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    (4, 256): (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(32, 16, 4, 1)),
}
# (generation, kernel) -> (bytes, head dims of q and of v, 64 at least) -> blocks.  Each four warps of Hopper
# multiply 64 rows at a time, and with fewer than 64 columns their operands' way out of shared memory takes
# longer than the product.  Keys are the rows of the key gradient's scores: 128 of them are two such groups,
# each with rows of its own, and 64 queries fill the columns.  At head dim 128 Hopper's are the fastest of ten
# on an H200, by 4 to 13% before those that had been reckoned.
OF_GENERATION = {
    (9, "forward"): {(2, 128, 128): Blocks(64, 64, 4, 3)},
    (9, "query grad"): {(2, 128, 128): Blocks(128, 64, 8, 3), (2, 256, 128): Blocks(128, 64, 8, 2)},
    (9, "key grad"): {(2, 128, 128): Blocks(64, 128, 8, 3)},
    (10, "query grad"): {(2, 128, 128): Blocks(128, 64, 8, 2), (2, 256, 128): Blocks(64, 64, 8, 2)},
    (10, "key grad"): {(2, 128, 128): Blocks(64, 128, 8, 2), (2, 256, 128): Blocks(64, 64, 8, 1)},
}


def unsupported(q: Tensor, *tensors: Tensor, **options: object) -> list[str]:
    reasons = tensor_reasons("q", q)
    for name, x in zip("qkv", (q, *tensors), strict=False):
        if name != "k" and x.shape[-1] > MAX_HEAD_DIM:
            reasons.append(f"the head dim of {name} must be at most {MAX_HEAD_DIM}, got {x.shape[-1]}")
        reasons += dense_reasons(name, x)
    return reasons


def path(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    return flash.path(q, k, v, options.get("rule"))


def forward(call: AttentionCall) -> AttentionResults:
    return one_pass(call) if _is_own(call) else flash.forward(call)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    return one_pass_backward(call, results, grads) if _is_own(call) else flash.backward(call, results, grads)


def _is_own(call: AttentionCall) -> bool:
    return bool(flash.refusals(call.q, call.k, call.v, call.rule))


def one_pass(call: AttentionCall) -> AttentionResults:
    q, k, v, layout, rule, sinks, _ = call
    total, heads, _ = q.shape
    out = torch.empty(total, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    dims = q.shape[2], v.shape[2]
    blocks = _blocks("forward", dims, q.dtype, rule)
    plan = _query_plan(layout, rule, blocks, q.device)
    keys = layout.gathered(q.device).keys if rule.bitwise else None
    if total:
        with torch.cuda.device_of(q):
            attention_forward_kernel[(len(plan.tiles) * heads,)](
                *_strided(q), *_strided(k), *_strided(v), None if sinks is None else sinks.contiguous(),
                out, lse, plan.tiles, plan.runs, keys, *layout.row_tables(q.device), total, *_numbers(rule),
                HEADS=heads, GROUP=heads // k.shape[1], **_shape(dims, blocks, blocks.k),
            )  # fmt: skip
    return AttentionResults(out, lse)


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
        rows = 4096 // max(64, _width(v_dim))
        attention_delta_kernel[(triton.cdiv(total, rows) * heads,)](
            *_strided(grad_out), out, delta, total,
            HEADS=heads, DV=v_dim, V_WIDTH=_width(v_dim), ROWS=rows, num_warps=4,
        )  # fmt: skip
        of_rows = Rows(lse, delta, grad_out)
        _query_grad(call, of_rows, found)
        _key_grads(call, of_rows, found)
    return found


class Rows(NamedTuple):
    """What backward reads of a row besides q."""

    lse: Tensor  # [Hq, T]
    delta: Tensor  # [Hq, T], of out and its gradient
    grad_out: Tensor


def _query_grad(call: AttentionCall, of_rows: Rows, found: AttentionGrads) -> None:
    q, k, v, layout, rule, *_ = call
    lse, delta, grad_out = of_rows
    total, heads, _ = q.shape
    dims = q.shape[2], v.shape[2]
    blocks = _blocks("query grad", dims, q.dtype, rule)
    plan = _query_plan(layout, rule._replace(bitwise=False), blocks, q.device)
    attention_query_grad_kernel[(len(plan.tiles) * heads,)](
        *_strided(q), *_strided(k), *_strided(v), *_strided(grad_out), lse, delta, found.q,
        plan.tiles, plan.runs, *layout.row_tables(q.device), total, *_numbers(rule),
        HEADS=heads, GROUP=heads // k.shape[1], **_shape(dims, blocks, blocks.k),
    )  # fmt: skip


def _key_grads(call: AttentionCall, of_rows: Rows, found: AttentionGrads) -> None:
    q, k, v, layout, rule, *_ = call
    lse, delta, grad_out = of_rows
    total, heads, _ = q.shape
    kv_heads, dims = k.shape[1], (k.shape[2], v.shape[2])
    blocks = _blocks("key grad", dims, q.dtype, rule)
    slot = 4 * kv_heads * blocks.k * sum(dims)  # bytes of a partial sum of keys and of values
    plan: KeyPlan = layout._on(
        q.device,
        f"triton keys {blocks.q} {blocks.k} {slot} {rule.window}",
        lambda: key_plan(layout, rule.window, blocks.q, blocks.k, slot),
    )
    size = plan.slots * kv_heads * blocks.k
    parts = [torch.empty(size, d, dtype=torch.float32, device=q.device) for d in dims]
    attention_key_grad_kernel[(len(plan.items) * kv_heads,)](
        *_strided(q), *_strided(k), *_strided(v), *_strided(grad_out), lse, delta, found.k, found.v, *parts,
        plan.items, plan.runs, *layout.row_tables(q.device), total, *_numbers(rule),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, **_shape(dims, blocks, blocks.q),
    )  # fmt: skip
    for part, grad, d in zip(parts, found[1:], dims, strict=True):
        rows = min(16, 2048 // _width(d))
        if len(plan.sums):
            attention_sum_kernel[(len(plan.sums) * (blocks.k // rows) * kv_heads,)](
                part, grad, plan.sums,
                KV_HEADS=kv_heads, D=d, WIDTH=_width(d), BK=blocks.k, ROWS=rows, num_warps=4,
            )  # fmt: skip


def _query_plan(layout: PrefixLayout, rule: AttentionRule, blocks: Blocks, device: torch.device) -> QueryPlan:
    make = logical_plan if rule.bitwise else query_plan
    name = f"triton {make.__name__} {blocks.q} {blocks.k} {rule.window}"
    plan: QueryPlan = layout._on(device, name, lambda: make(layout, rule.window, blocks.q, blocks.k))
    return plan


def _strided(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def _numbers(rule: AttentionRule) -> tuple[float, float | None, int]:
    return rule.scale, rule.softcap or None, rule.window or NO_WINDOW


def _width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _shape(dims: tuple[int, int], blocks: Blocks, visited: int) -> dict[str, int]:
    return {
        "D": dims[0],
        "WIDTH": _width(dims[0]),
        "DV": dims[1],
        "V_WIDTH": _width(dims[1]),
        "BQ": blocks.q,
        "BK": blocks.k,
        "STEP": max(16, visited // 2),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _blocks(kernel: str, dims: tuple[int, int], dtype: torch.dtype, rule: AttentionRule) -> Blocks:
    nvidia = torch.version.hip is None
    heads = max(64, _width(dims[0])), max(64, _width(dims[1]))
    shape, width = (dtype.itemsize, *heads), max(heads)
    blocks = (NVIDIA if nvidia else AMD)[dtype.itemsize, width][KERNELS.index(kernel)]
    blocks = OF_GENERATION.get((generation(), kernel), {}).get(shape, blocks)
    # a softcap's polynomial takes registers, and on AMD so do the masks of a head dim that fills no tile:
    # half as many rows at a time, but enough for tensor cores
    if rule.softcap or (not nvidia and min(dims) < width):
        visited = "q" if kernel == "key grad" else "k"
        rows: int = getattr(blocks, visited)
        least = 16 if not nvidia or (visited == "k" and dtype.itemsize == 4) else 32
        return blocks._replace(**{visited: min(rows, max(least, rows // 2))})
    return blocks
