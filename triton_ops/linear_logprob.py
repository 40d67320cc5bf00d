"""``linear_logprob`` over Triton: library GEMMs with the kernels of ``logprob``, or one fused forward kernel.

``algorithm="auto"`` is "tiled": no result file shows yet that the fused kernel is faster on some device.

The fused kernel multiplies a block of tokens with one part of the vocabulary, block by block, and keeps
only each row's running maximum and sums, so the logits never reach memory.  The parts depend on V alone and
are merged in their order by a second kernel: a row's bits do not depend on the number of tokens.  Its FLOPs
are those of one GEMM, ``2 N H V``; its bytes those of the weight, once per block of tokens from L2, and 16
per token and part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import LogprobResults, RowGrads
from rlkernel.drivers import linear_logprob as driver
from rlkernel.runtime import workspace
from rlkernel.triton_ops import logprob as kernels
from rlkernel.triton_ops._device import DTYPES, device_reasons, vocabulary_reasons
from rlkernel.triton_ops.logprob_kernels import (
    LOG2E,
    State,
    finish,
    finite_or_zero,
    load_state,
    load_temperature,
    merge,
    shift_from,
    store_statistics,
    transform,
)

PART = 4096  # vocabulary entries of one program: many programs for a GPU, few sums to merge
MERGED_ROWS = 64


def unsupported(
    hidden: Tensor,
    weight: Tensor,
    *tensors: Tensor,
    compute_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    **options: object,
) -> list[str]:
    reasons = device_reasons(hidden) + vocabulary_reasons(weight.shape[0])
    compute_dtype = compute_dtype or torch.promote_types(hidden.dtype, weight.dtype)
    if compute_dtype not in DTYPES:
        reasons.append(f"the product must be in float32, float16 or bfloat16, got {compute_dtype}")
    if algorithm == "fused" and compute_dtype == torch.float32:
        reasons.append("algorithm 'fused' needs float16 or bfloat16: tensor cores round float32 to TF32")
    if algorithm == "fused" and weight.stride(-1) != 1 and weight.shape[1] > 1:
        reasons.append(f"algorithm 'fused' needs dense rows of weight, got strides {weight.stride()}")
    return reasons


def forward(call: LinearLogprobCall) -> LinearLogprobResults:
    if call.algorithm != "fused":
        return driver.forward(kernels, call)
    results = LinearLogprobResults.of(_fused(call))
    if call.need_direction:  # the backward pass of ones
        ones = RowGrads(torch.ones_like(results.logprobs))
        direction = backward(call._replace(needs=(True, False, False)), results, ones).hidden
        results = results._replace(direction=direction)
    return results


def backward(call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads) -> LinearGrads:
    return driver.backward(kernels, call, results, grads)


def _fused(call: LinearLogprobCall) -> LogprobResults:
    hidden, weight, target_ids, head = call.hidden, call.weight, call.target_ids, call.head
    return_entropy = call.return_entropy
    n, size = hidden.shape
    vocab = weight.shape[0]
    outputs = LogprobResults.empty(target_ids, return_entropy)
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    target_ids = target_ids.contiguous()
    bias = None if head.bias is None else head.bias.float().contiguous()
    scale = None if head.logit_scale == 1.0 else head.logit_scale
    block, warps, stages = _product_plan(size)
    parts = triton.cdiv(vocab, PART)
    row_bytes = len(State) * torch.float32.itemsize * parts
    chunk = max(1, workspace.limit() // (row_bytes * block["BM"])) * block["BM"]
    with workspace.lease(row_bytes * min(chunk, n), hidden.device) as (memory, _, _):
        for start in range(0, n, chunk):
            rows = min(chunk, n - start)
            part = memory[: row_bytes * rows].view(torch.float32)
            ids, (t, scalar_t) = target_ids[start : start + rows], kernels.per_row(head.temperature)
            t = None if t is None else t[start : start + rows]
            with torch.cuda.device_of(hidden):
                product_kernel[(triton.cdiv(rows, block["BM"]) * parts,)](
                    hidden[start:], hidden.stride(0), weight, weight.stride(0), rows, vocab, size, ids,
                    head.ignore_index, t, scalar_t, bias, scale, head.softcap, part,
                    ENTROPY=return_entropy, COMPUTE=_tl(head.compute_dtype), LOGITS=_tl(head.logits_dtype),
                    PART=PART, WHOLE_K=size % block["BK"] == 0, **block,
                    num_warps=warps, num_stages=stages, enable_fp_fusion=False,
                )  # fmt: skip
                merge_kernel[(triton.cdiv(rows, MERGED_ROWS),)](
                    part, rows, vocab, parts, ids, head.ignore_index, t, scalar_t,
                    *(None if x is None else x[start : start + rows] for x in outputs.statistics),
                    PART=PART, ROWS=MERGED_ROWS, num_warps=2, enable_fp_fusion=False,
                )  # fmt: skip
    return outputs


def _product_plan(size: int) -> tuple[dict[str, int], int, int]:
    """Tile, warps and stages of the product: never from N, or a row's bits would depend on it."""
    if size % 16:  # rows that cannot be loaded 16 bytes at a time pass through registers
        return {"BM": 64, "BN": 64, "BK": 32}, 4, 2
    # 96 KiB of shared memory; AMD has 64 KiB, and its stages stay in registers but for one
    return {"BM": 128, "BN": 128, "BK": 64}, 8, 3 if torch.version.hip is None else 2


def _tl(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@triton.jit(do_not_specialize=["N", "V", "ignore_index"])
def product_kernel(
    hidden, hidden_stride: tl.int64, weight, weight_stride: tl.int64, N, V, H,
    target_ids, ignore_index: tl.int64,
    temperatures, temperature: tl.float64, bias, logit_scale, softcap, part,
    ENTROPY: tl.constexpr, COMPUTE: tl.constexpr, LOGITS: tl.constexpr, PART: tl.constexpr,
    WHOLE_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # neighbours in the grid take the same part of the vocabulary, so that the weight is read from L2
    blocks = tl.cdiv(N, BM)
    index = tl.program_id(0) // blocks
    rows = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    inside = rows < N
    row = tl.minimum(rows, N - 1).to(tl.int64)  # rows beyond the end repeat the last, and are not stored
    targets = tl.load(target_ids + row)
    if tl.max((targets != ignore_index).to(tl.int32), axis=0) == 0:
        return
    c = (1.0 / load_temperature(temperatures, temperature, row) * LOG2E).to(tl.float32)
    c = tl.broadcast_to(c, (BM,))
    m = tl.full((BM,), float("-inf"), tl.float32)
    s = tl.zeros((BM,), tl.float32)
    w = tl.zeros((BM,), tl.float32)
    y_target = tl.zeros((BM,), tl.float32)
    k = tl.arange(0, BK)
    a_ptr = hidden + row[:, None] * hidden_stride + k[None, :]
    begin = index * PART
    for start in range(begin, tl.minimum(begin + PART, V), BN):
        columns = start + tl.arange(0, BN)
        column = tl.minimum(columns, V - 1).to(tl.int64)
        b_ptr = weight + column[None, :] * weight_stride + k[:, None]
        y = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, H, BK):
            if WHOLE_K:
                a = tl.load(a_ptr + k0)
                b = tl.load(b_ptr + k0)
            else:
                a = tl.load(a_ptr + k0, mask=k[None, :] + k0 < H, other=0.0)
                b = tl.load(b_ptr + k0, mask=k[:, None] + k0 < H, other=0.0)
            y = tl.dot(a.to(COMPUTE), b.to(COMPUTE), y)
        y = y.to(LOGITS)
        y = transform(y, bias, columns[None, :], (columns < V)[None, :], logit_scale, softcap)[0]
        y_target += tl.sum(tl.where(columns[None, :] == targets[:, None], y, 0.0), axis=1)
        y = tl.where((columns < V)[None, :], y, float("-inf"))
        top = tl.maximum(m, tl.max(y, axis=1))
        safe = finite_or_zero(top)
        shift = shift_from(m, safe, c)
        a_row = tl.exp2(shift)
        d = (y - safe[:, None]) * c[:, None]
        e = tl.exp2(d)
        if ENTROPY:
            weighted = tl.sum(e * tl.maximum(d, -150.0), axis=1)  # as in logprob: 0 * -inf would be NaN
            w = tl.fma(tl.fma(s, shift, w), a_row, weighted)
        s = tl.fma(s, a_row, tl.sum(e, axis=1))
        m = top
    out = part + index.to(tl.int64) * N + rows
    plane = tl.cdiv(V, PART).to(tl.int64) * N
    tl.store(out + State.maximum * plane, m, mask=inside)
    tl.store(out + State.sum_exp * plane, s, mask=inside)
    tl.store(out + State.weighted_sum * plane, w, mask=inside)
    tl.store(out + State.at_target * plane, y_target, mask=inside)


@triton.jit(do_not_specialize=["N", "V", "parts", "ignore_index"])
def merge_kernel(
    part, N, V, parts, target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64,
    logprobs, entropy, lse, row_max, log_sum,
    PART: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    row = tl.minimum(rows, N - 1).to(tl.int64)
    targets = tl.load(target_ids + row)
    t = tl.broadcast_to(load_temperature(temperatures, temperature, row), (ROWS,))
    c = (1.0 / t * LOG2E).to(tl.float32)
    plane = parts.to(tl.int64) * N
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float64)
    w = tl.zeros((ROWS,), tl.float64)
    for index in range(parts):
        at = part + tl.cast(index, tl.int64) * N + row
        m1, s1, w1 = load_state(at, plane)
        m, s, w = merge(m, s, w, m1, s1, w1, c)
    known = (targets >= 0) & (targets < V)
    at = part + State.at_target * plane + tl.where(known, targets // PART, 0) * N + row
    y_target = tl.load(at, mask=known, other=float("nan"))
    row_logprob, row_entropy, row_lse, row_log_sum = finish(m, s, w, y_target, t)
    kept = targets != ignore_index
    values = (
        tl.where(kept, row_logprob, 0.0), tl.where(kept, row_entropy, 0.0), tl.where(kept, row_lse, 0.0),
        tl.where(kept, m, 0.0), tl.where(kept, row_log_sum, 0.0),
    )  # fmt: skip
    store_statistics(logprobs, entropy, lse, row_max, log_sum, rows, values, inside)
