"""``logprob`` over Triton: one read of the logits forward, one read and one write backward.

Also the tile functions that ``rlkernel.drivers.linear_logprob`` calls.  Plans (block sizes) follow from V and
the dtype alone.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads, Tile
from rlkernel.drivers.logprob import unfiltered_ids, with_unfiltered_rows
from rlkernel.triton_ops import sampling
from rlkernel.triton_ops._device import DTYPES, device_reasons
from rlkernel.triton_ops.logprob_kernels import MAX_VOCAB, backward_kernel, exp_kernel, forward_kernel
from rlkernel.triton_ops.logprob_support_kernels import support_backward_kernel, support_forward_kernel

SUPPORT = {"BLOCK": 256, "num_warps": 2, "enable_fp_fusion": False}  # most rows keep fewer tokens


def unsupported(logits: Tensor, *tensors: Tensor, **options: object) -> list[str]:
    reasons = device_reasons(logits)
    if logits.dtype not in DTYPES:
        reasons.append(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if logits.shape[-1] > MAX_VOCAB:
        reasons.append(f"the vocabulary must be at most {MAX_VOCAB}, got {logits.shape[-1]}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        reasons.append(f"logits must be dense in the last dimension, got strides {logits.stride()}")
    return reasons


def forward(call: LogprobCall) -> LogprobResults:
    if call.support_ids is None:
        results = empty_results(call)
        tile_forward(_tile(call), None, True, True, results)
        return results
    logits, ids = call.logits, call.support_ids
    values = logits.contiguous() if call.gathered else logits.new_zeros(ids.shape)
    results = empty_results(call)._replace(values=values)
    _support_forward(call, results)
    return results if call.gathered else with_unfiltered_rows(sampling.forward, results, call)


def backward(call: LogprobCall, results: LogprobResults, grads: RowGrads) -> tuple[Tensor]:
    if call.gathered:
        assert results.values is not None
        out = torch.zeros_like(results.values, dtype=torch.float32)
        _support_backward(call, results, grads, out)
        return (out,)
    out = call.logits if call.inplace_backward else torch.empty_like(call.logits)
    # to the kernel of whole rows those with a support are ignored ones: it leaves zeros there
    tile = _tile(call if call.support_ids is None else call._replace(target_ids=unfiltered_ids(call)))
    tile_backward(tile, grads, results, out)
    if call.support_ids is not None:
        _support_backward(call, results, grads, out)
    return (out,)


def _support_forward(call: LogprobCall, results: LogprobResults) -> None:
    layout = (call.target_ids.numel(), 1, [(0, 0)]) if call.gathered else _rows(call.logits)
    if layout is None:
        for i in range(len(call.target_ids)):
            _support_forward(_part(call, i), _row_results(results, i))
        return
    rows, inner, (strides,) = layout
    if rows:
        with torch.cuda.device_of(call.logits):
            support_forward_kernel[(rows,)](
                call.logits, inner, *strides, call.logits.shape[-1], call.target_ids.contiguous(),
                call.ignore_index, *per_row(call.temperature), call.support_ids, call.support_offsets,
                results.values, *results[:5], GATHERED=call.gathered, **SUPPORT,
            )  # fmt: skip


def _support_backward(call: LogprobCall, results: LogprobResults, grads: RowGrads, out: Tensor) -> None:
    layout = (call.target_ids.numel(), 1, [(0, 0)]) if call.gathered else _rows(out)
    if layout is None:
        for i in range(len(call.target_ids)):
            row_grads = RowGrads(*(_at(x, i) for x in grads))
            _support_backward(_part(call, i), _row_results(results, i), row_grads, out[i])
        return
    rows, inner, (strides,) = layout
    if rows:
        with torch.cuda.device_of(out):
            support_backward_kernel[(rows,)](
                results.values, call.target_ids.contiguous(), call.ignore_index, *per_row(call.temperature),
                call.support_ids, call.support_offsets, *grads, results.logprobs,
                None if grads.entropy is None else results.entropy, results.row_max, results.log_sum, out,
                inner, *strides, out.shape[-1], SCATTERED=not call.gathered, **SUPPORT,
            )  # fmt: skip


def _part(call: LogprobCall, i: int) -> LogprobCall:
    """The rows below index ``i`` of the first dimension."""
    assert call.support_offsets is not None
    size = call.target_ids[0].numel()
    return call._replace(
        logits=_at(call.logits, i),
        target_ids=call.target_ids[i],
        temperature=_at(call.temperature, i),
        support_offsets=call.support_offsets[i * size : (i + 1) * size + 1],
    )


def tile_forward(tile: Tile, state: Tensor | None, first: bool, last: bool, results: LogprobResults) -> None:
    """Continue the rows' softmax with ``tile`` in ``state`` [4, R]; the last writes ``results``."""
    layout = _rows(tile.logits)
    if layout is None:
        for i in range(len(tile.logits)):
            tile_forward(_row_tile(tile, i), state, first, last, _row_results(results, i))
        return
    rows, inner, (strides,) = layout
    vocab = tile.logits.shape[-1]
    lanes, vec, warps = _row_plan(vocab, tile.logits.dtype)
    scattered = any(x % 16 for x in (vocab, *strides, tile.logits.data_ptr()))
    if rows:
        with torch.cuda.device_of(tile.logits):
            forward_kernel[(rows,)](
                tile.logits, inner, *strides, vocab, *_head(tile),
                state, 0 if state is None else state.stride(0), *results[:5],
                FIRST=first, LAST=last, SCATTERED=scattered, LANES=lanes, VEC=vec, num_warps=warps,
                enable_fp_fusion=False,
            )  # fmt: skip


def tile_backward(tile: Tile, grads: RowGrads, results: LogprobResults, out: Tensor) -> None:
    """Write the gradient of ``tile`` into ``out``, which may be the tile itself."""
    layout = _rows(tile.logits, out)
    if layout is None:
        for i in range(len(tile.logits)):
            row_grads = RowGrads(*(_at(x, i) for x in grads))
            tile_backward(_row_tile(tile, i), row_grads, _row_results(results, i), out[i])
        return
    rows, inner, (strides, out_strides) = layout
    vocab = tile.logits.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.logits.dtype)
    spans = triton.cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile.logits):
            backward_kernel[(rows * spans,)](
                tile.logits, inner, *strides, vocab, *_head(tile), *grads,
                None if grads.entropy is None else results.entropy, results.row_max, results.log_sum,
                out, *out_strides, spans, SPAN=span, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def tile_exp(tile: Tile, row_max: Tensor, out: Tensor) -> None:
    """Write ``exp((y - row_max) / T) * dy/dx / T`` into ``out``, 0 at the target and on ignored rows."""
    rows, inner, (strides, out_strides) = _rows(tile.logits, out)  # type: ignore[misc]
    vocab = tile.logits.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.logits.dtype)
    spans = triton.cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile.logits):
            exp_kernel[(rows * spans,)](
                tile.logits, inner, *strides, vocab, *_head(tile), row_max, out, *out_strides, spans,
                SPAN=span, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def _tile(call: LogprobCall) -> Tile:
    return Tile(call.logits, 0, call.target_ids, call.temperature, call.ignore_index)


def _head(tile: Tile) -> tuple[Any, ...]:
    """What the kernels of a tile take behind its layout."""
    return (
        tile.vocab_start, tile.target_ids.contiguous(), tile.ignore_index, *per_row(tile.temperature),
        tile.bias, None if tile.logit_scale == 1.0 else tile.logit_scale, tile.softcap,
    )  # fmt: skip


def _row_tile(tile: Tile, i: int) -> Tile:
    return tile._replace(
        logits=tile.logits[i], target_ids=tile.target_ids[i], temperature=_at(tile.temperature, i)
    )


def _row_results(results: LogprobResults, i: int) -> LogprobResults:
    rows = {name: _at(getattr(results, name), i) for name in results._fields if name != "values"}
    return results._replace(**rows)


def _rows(*tensors: Tensor) -> tuple[int, int, list[tuple[int, int]]] | None:
    """``(rows, inner, [(outer_stride, inner_stride), ...])`` where row r of each tensor starts at
    ``r // inner * outer_stride + r % inner * inner_stride``; None where two strides do not suffice (more than
    two leading dimensions that do not continue each other): the first is then a loop of launches."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(tensors[0].dim() - 1):
        size, strides = tensors[0].shape[dim], tuple(t.stride(dim) for t in tensors)
        if size == 0:
            return 0, 1, [(0, 0)] * len(tensors)
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], strides, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, strides))
    if len(merged) > 2:
        return None
    no_dim = (1, (0,) * len(tensors))
    (outer, outer_strides), (inner, inner_strides) = [no_dim] * (2 - len(merged)) + merged
    return outer * inner, inner, list(zip(outer_strides, inner_strides, strict=True))


def _row_plan(vocab: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(lanes, vec, warps)`` of the forward kernel: a lane takes one 16-byte load a block.

    Two loads a thread: 32 KiB in flight on a multiprocessor with 1024 threads, where an H100 needs 20 KiB
    (3.35 TB/s / 132 * 0.8 us).  The bits follow from lanes and vec; warps are free to differ.
    """
    vec = 16 // dtype.itemsize
    lanes = max(32, min(512, triton.next_power_of_2(triton.cdiv(vocab, vec))))
    return lanes, vec, max(1, lanes // (64 if torch.version.hip is None else 128))


def _elementwise_plan(vocab: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(block, span, warps)``: a program takes ``span`` entries of a row, ``block`` at a time."""
    lanes, vec, warps = _row_plan(vocab, dtype)
    block = lanes * vec
    return block, min(4, triton.cdiv(vocab, block)) * block, warps


def per_row(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)


def empty_results(call: LogprobCall) -> LogprobResults:
    logprobs = torch.empty(call.target_ids.shape, dtype=torch.float32, device=call.logits.device)
    lse, row_max, log_sum = (torch.empty_like(logprobs) for _ in range(3))
    entropy = torch.empty_like(logprobs) if call.return_entropy else None
    return LogprobResults(logprobs, entropy, lse, row_max, log_sum)


def _at(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, Tensor) else x


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""

    def rows(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.ones(2)

    def head_tile(vocab: int, dtype: torch.dtype, head: bool) -> Tile:
        logits, ids, t = rows(vocab, dtype)
        if head:
            return Tile(logits, 4096, ids, t, -100, torch.ones(vocab), 0.5, 30.0)
        return Tile(logits, 4096, ids, 1.0, -100)

    def results(entropy: bool = True) -> LogprobResults:
        t = torch.ones(2)
        return LogprobResults(t, t if entropy else None, t, t, t)

    def run_forward(vocab: int, dtype: torch.dtype, entropy: bool, per_row: bool) -> None:
        logits, ids, t = rows(vocab, dtype)
        forward(LogprobCall(logits, ids, t if per_row else 0.7, -100, entropy))

    def run_backward(vocab: int, dtype: torch.dtype, grads: str, per_row: bool) -> None:
        logits, ids, t = rows(vocab, dtype)
        upstream = RowGrads(*(t if name in grads else None for name in RowGrads._fields))
        backward(LogprobCall(logits, ids, t if per_row else 0.7, -100, True, True), results(), upstream)

    def run_tile_forward(dtype: torch.dtype, head: bool, first: bool, last: bool) -> None:
        tile_forward(head_tile(8192, dtype, head), torch.ones(4, 2), first, last, results())

    def run_tile_backward(dtype: torch.dtype, out_dtype: torch.dtype, head: bool) -> None:
        grads, out = RowGrads(*(torch.ones(2),) * 3), torch.empty(2, 8192, dtype=out_dtype)
        tile_backward(head_tile(8192, dtype, head), grads, results(), out)

    def run_tile_exp(out_dtype: torch.dtype, head: bool) -> None:
        out = torch.empty(2, 8192, dtype=out_dtype)
        tile_exp(head_tile(8192, torch.float32, head), torch.ones(2), out)

    def run_support(vocab: int, dtype: torch.dtype, entropy: bool, per_row: bool, gathered: bool) -> None:
        logits, targets, t = rows(vocab, dtype)
        ids, offsets = torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
        source, temperature = logits[0, :6] if gathered else logits, t if per_row else 0.7
        call = LogprobCall(source, targets, temperature, -100, entropy, False, ids, offsets, gathered)
        stats = results(entropy)._replace(values=logits[0, :6])
        _support_forward(call, stats)
        grads = RowGrads(t, t if entropy else None, None if gathered else t)
        _support_backward(call, stats, grads, torch.zeros(6) if gathered else logits)

    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    everything = "logprobs entropy lse"
    return {
        "forward bf16 entropy": lambda: run_forward(151936, bf16, True, False),
        "forward bf16": lambda: run_forward(151936, bf16, False, False),
        "forward fp16 entropy": lambda: run_forward(151936, fp16, True, False),
        "forward fp32 entropy": lambda: run_forward(151936, fp32, True, False),
        "forward bf16 entropy odd V": lambda: run_forward(50257, bf16, True, True),
        "forward bf16 entropy small V": lambda: run_forward(100, bf16, True, False),
        "forward bf16 V = 1": lambda: run_forward(1, bf16, False, False),
        "backward bf16": lambda: run_backward(151936, bf16, "logprobs", False),
        "backward bf16 all": lambda: run_backward(151936, bf16, everything, False),
        "backward fp16 all": lambda: run_backward(151936, fp16, everything, False),
        "backward fp32 all": lambda: run_backward(151936, fp32, everything, False),
        "backward bf16 all odd V": lambda: run_backward(50257, bf16, everything, True),
        "tile forward fp32 first": lambda: run_tile_forward(fp32, False, True, False),
        "tile forward fp32 middle": lambda: run_tile_forward(fp32, False, False, False),
        "tile forward fp32 head last": lambda: run_tile_forward(fp32, True, False, True),
        "tile forward bf16 head last": lambda: run_tile_forward(bf16, True, False, True),
        "tile backward fp32 to bf16": lambda: run_tile_backward(fp32, bf16, False),
        "tile backward fp32 to bf16 head": lambda: run_tile_backward(fp32, bf16, True),
        "tile backward fp32 head": lambda: run_tile_backward(fp32, fp32, True),
        "tile exp fp32 to bf16": lambda: run_tile_exp(bf16, False),
        "tile exp fp32 to bf16 head": lambda: run_tile_exp(bf16, True),
        "support bf16": lambda: run_support(151936, bf16, False, False, False),
        "support bf16 entropy": lambda: run_support(50257, bf16, True, True, False),
        "support fp16 entropy": lambda: run_support(151936, fp16, True, False, False),
        "support fp32 gathered": lambda: run_support(151936, fp32, True, False, True),
    }
