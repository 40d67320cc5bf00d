"""``logprob`` over Triton: one read of the logits forward, one read and one write backward.

Also the tile functions that ``rlkernel.tiles`` calls.  Plans (block sizes) follow from V and the dtype alone.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rlkernel import whole_rows
from rlkernel.triton_ops.logprob_kernels import MAX_VOCAB, backward_kernel, exp_kernel, forward_kernel
from rlkernel.triton_ops.logprob_support_kernels import support_backward_kernel, support_forward_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]
SupportStats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]
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


def device_reasons(tensor: Tensor) -> list[str]:
    if tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    return [f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {tensor.device}"]


def forward(
    logits: Tensor, target_ids: Tensor, temperature: float | Tensor, ignore_index: int, return_entropy: bool
) -> Stats:
    outputs = empty_stats(logits.shape[:-1], logits.device, return_entropy)
    _forward(logits, 0, target_ids, temperature, ignore_index, None, 1.0, None, None, True, True, outputs)
    return outputs


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    inplace: bool,
) -> Tensor:
    out = logits if inplace else torch.empty_like(logits)
    tile_backward(
        logits, 0, target_ids, temperature, ignore_index, None, 1.0, None, grad_logprobs, grad_entropy,
        grad_lse, entropy, row_max, log_sum, out,
    )  # fmt: skip
    return out


def support_forward(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    return_entropy: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
    gathered: bool,
) -> SupportStats:
    """One kernel takes rows with a support, ``sampling``'s the whole ones: see the reference."""
    from rlkernel.triton_ops import sampling  # it imports this module itself

    stats = empty_stats(target_ids.shape, logits.device, return_entropy)
    values = logits.contiguous() if gathered else logits.new_zeros(support_ids.shape)
    options = ignore_index, support_ids, values, gathered
    _support_forward(logits, target_ids, temperature, support_offsets, stats, *options)
    if not gathered:
        row = target_ids, temperature, ignore_index, support_offsets
        stats = whole_rows.filled(sampling.forward, stats, logits, *row)
    return *stats, values


def _support_forward(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    support_offsets: Tensor,
    stats: Stats,
    ignore_index: int,
    support_ids: Tensor,
    values: Tensor,
    gathered: bool,
) -> None:
    layout = (target_ids.numel(), 1, [(0, 0)]) if gathered else _rows(logits)
    if layout is None:
        size = target_ids[0].numel()
        for i in range(len(target_ids)):
            offsets = support_offsets[i * size : (i + 1) * size + 1]
            part = tuple(_at(x, i) for x in stats)
            options = ignore_index, support_ids, values, gathered
            _support_forward(logits[i], target_ids[i], _at(temperature, i), offsets, part, *options)
        return
    rows, inner, (strides,) = layout
    if rows:
        with torch.cuda.device_of(logits):
            support_forward_kernel[(rows,)](
                logits, inner, *strides, logits.shape[-1], target_ids.contiguous(), ignore_index,
                *per_row(temperature), support_ids, support_offsets, values, *stats,
                GATHERED=gathered, **SUPPORT,
            )  # fmt: skip


def support_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    values: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    support_ids: Tensor,
    support_offsets: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    out: Tensor | None,
) -> Tensor:
    scattered = out is not None
    if out is None:
        out = torch.zeros_like(values, dtype=torch.float32)
    layout = _rows(out) if scattered else (target_ids.numel(), 1, [(0, 0)])
    if layout is None:
        size = target_ids[0].numel()
        for i in range(len(target_ids)):
            offsets = support_offsets[i * size : (i + 1) * size + 1]
            support_backward(
                _at(grad_logprobs, i), _at(grad_entropy, i), _at(grad_lse, i), values, target_ids[i],
                _at(temperature, i), ignore_index, support_ids, offsets, logprobs[i], _at(entropy, i),
                row_max[i], log_sum[i], out[i],
            )  # fmt: skip
        return out
    rows, inner, (strides,) = layout
    if rows:
        with torch.cuda.device_of(out):
            support_backward_kernel[(rows,)](
                values, target_ids.contiguous(), ignore_index, *per_row(temperature), support_ids,
                support_offsets, grad_logprobs, grad_entropy, grad_lse, logprobs,
                None if grad_entropy is None else entropy, row_max, log_sum, out, inner, *strides,
                out.shape[-1], SCATTERED=scattered, **SUPPORT,
            )  # fmt: skip
    return out


def tile_forward(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    state: Tensor,
    first: bool,
    last: bool,
    outputs: Stats,
) -> None:
    """Continue the rows' softmax with ``tile`` [R, Vt] in ``state`` [4, R]; the last writes ``outputs``."""
    _forward(
        tile, vocab_start, target_ids, temperature, ignore_index, bias, logit_scale, softcap, state, first,
        last, outputs,
    )  # fmt: skip


def tile_backward(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    out: Tensor,
) -> None:
    """Write the gradient of ``tile`` into ``out``, which may be the tile itself."""
    layout = _rows(tile, out)
    if layout is None:
        for i in range(tile.shape[0]):
            parts = (grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum, out)
            tile_backward(
                tile[i], vocab_start, target_ids[i], _at(temperature, i), ignore_index, bias, logit_scale,
                softcap, *(_at(x, i) for x in parts),
            )  # fmt: skip
        return
    rows, inner, (strides, out_strides) = layout
    vocab = tile.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.dtype)
    spans = triton.cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile):
            backward_kernel[(rows * spans,)](
                tile, inner, *strides, vocab, vocab_start, target_ids.contiguous(), ignore_index,
                *per_row(temperature), bias, _unless_one(logit_scale), softcap,
                grad_logprobs, grad_entropy, grad_lse, None if grad_entropy is None else entropy, row_max,
                log_sum, out, *out_strides, spans,
                SPAN=span, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def tile_exp(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    row_max: Tensor,
    out: Tensor,
) -> None:
    """Write ``exp((y - row_max) / T) * dy/dx / T`` into ``out``, 0 at the target and on ignored rows."""
    rows, inner, (strides, out_strides) = _rows(tile, out)  # type: ignore[misc]
    vocab = tile.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.dtype)
    spans = triton.cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile):
            exp_kernel[(rows * spans,)](
                tile, inner, *strides, vocab, vocab_start, target_ids.contiguous(), ignore_index,
                *per_row(temperature), bias, _unless_one(logit_scale), softcap, row_max,
                out, *out_strides, spans, SPAN=span, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def _forward(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    state: Tensor | None,
    first: bool,
    last: bool,
    outputs: Stats,
) -> None:
    layout = _rows(tile)
    if layout is None:
        for i in range(tile.shape[0]):
            _forward(
                tile[i], vocab_start, target_ids[i], _at(temperature, i), ignore_index, bias, logit_scale,
                softcap, state, first, last, tuple(_at(x, i) for x in outputs),
            )  # fmt: skip
        return
    rows, inner, (strides,) = layout
    vocab = tile.shape[-1]
    lanes, vec, warps = _row_plan(vocab, tile.dtype)
    scattered = any(x % 16 for x in (vocab, *strides, tile.data_ptr()))
    if rows:
        with torch.cuda.device_of(tile):
            forward_kernel[(rows,)](
                tile, inner, *strides, vocab, vocab_start, target_ids.contiguous(), ignore_index,
                *per_row(temperature), bias, _unless_one(logit_scale), softcap,
                state, 0 if state is None else state.stride(0), *outputs,
                FIRST=first, LAST=last, SCATTERED=scattered, LANES=lanes, VEC=vec, num_warps=warps,
                enable_fp_fusion=False,
            )  # fmt: skip


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


def empty_stats(shape: torch.Size, device: torch.device, entropy: bool) -> Stats:
    def rows() -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return rows(), rows() if entropy else None, rows(), rows(), rows()


def _at(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, Tensor) else x


def _unless_one(logit_scale: float) -> float | None:
    return None if logit_scale == 1.0 else logit_scale


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""

    def rows(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.ones(2)

    def head_tile(vocab: int, dtype: torch.dtype, head: bool) -> dict[str, Any]:
        tile, ids, t = rows(vocab, dtype)
        shared = {"tile": tile, "vocab_start": 4096, "target_ids": ids, "ignore_index": -100}
        if head:
            return shared | {"temperature": t, "bias": torch.ones(vocab), "logit_scale": 0.5, "softcap": 30.0}
        return shared | {"temperature": 1.0, "bias": None, "logit_scale": 1.0, "softcap": None}

    def run_forward(vocab: int, dtype: torch.dtype, entropy: bool, per_row: bool) -> None:
        tile, ids, t = rows(vocab, dtype)
        forward(tile, ids, t if per_row else 0.7, -100, entropy)

    def run_backward(vocab: int, dtype: torch.dtype, grads: str, per_row: bool) -> None:
        tile, ids, t = rows(vocab, dtype)
        g_logprobs, g_entropy, g_lse = (
            t if name in grads else None for name in ("logprobs", "entropy", "lse")
        )
        backward(g_logprobs, g_entropy, g_lse, tile, ids, t if per_row else 0.7, -100, t, t, t, True)

    def run_tile_forward(dtype: torch.dtype, head: bool, first: bool, last: bool) -> None:
        state, outputs = torch.ones(4, 2), (torch.ones(2),) * 5
        tile_forward(**head_tile(8192, dtype, head), state=state, first=first, last=last, outputs=outputs)

    def run_tile_backward(dtype: torch.dtype, out_dtype: torch.dtype, head: bool) -> None:
        arguments = head_tile(8192, dtype, head)
        names = ("grad_logprobs", "grad_entropy", "grad_lse", "entropy", "row_max", "log_sum")
        arguments |= dict.fromkeys(names, torch.ones(2))
        tile_backward(**arguments, out=torch.empty(2, 8192, dtype=out_dtype))

    def run_tile_exp(out_dtype: torch.dtype, head: bool) -> None:
        arguments = head_tile(8192, torch.float32, head)
        tile_exp(**arguments, row_max=torch.ones(2), out=torch.empty(2, 8192, dtype=out_dtype))

    def run_support(vocab: int, dtype: torch.dtype, entropy: bool, per_row: bool, gathered: bool) -> None:
        tile, targets, t = rows(vocab, dtype)
        ids, offsets = torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
        stats, h = empty_stats(targets.shape, tile.device, entropy), t if entropy else None
        source, temperature = tile[0, :6] if gathered else tile, t if per_row else 0.7
        values = tile[0, :6]
        _support_forward(source, targets, temperature, offsets, stats, -100, ids, values, gathered)
        row = targets, temperature, -100, ids, offsets, t, h, t, t
        if gathered:
            support_backward(t, h, None, values, *row, None)
        else:
            support_backward(t, h, t, values, *row, tile)

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
