"""``logprob`` over Triton: one read of the logits forward, one read and one write backward.

Also the tile functions that ``rlkernel.drivers.linear_logprob`` calls.  Plans (block sizes) follow from V and
the dtype alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads, Tile
from rlkernel.drivers.logprob import unfiltered_ids, with_unfiltered_rows
from rlkernel.triton_ops import sampling
from rlkernel.triton_ops._device import taking_logits
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.logprob_kernels import backward_kernel, exp_kernel, forward_kernel
from rlkernel.triton_ops.logprob_support_kernels import support_backward_kernel, support_forward_kernel

unsupported = taking_logits
SUPPORT = {"BLOCK": 256, "num_warps": 2, "enable_fp_fusion": False}  # most rows keep fewer tokens


def forward(call: LogprobCall) -> LogprobResults:
    results = LogprobResults.empty(call.target_ids, call.return_entropy)
    if call.support_ids is None:
        for part, of_part, _, _ in _pieces(call, results, RowGrads(), call.logits):
            tile_forward(_tile(part), None, True, True, of_part)
        return results
    logits, ids = call.logits, call.support_ids
    results = results._replace(values=logits.contiguous() if call.gathered else logits.new_zeros(ids.shape))
    for part, of_part, _, _ in _pieces(call, results, RowGrads(), call.logits):
        _support_forward(part, of_part)
    return results if call.gathered else with_unfiltered_rows(sampling.forward, results, call)


def backward(call: LogprobCall, results: LogprobResults, grads: RowGrads) -> tuple[Tensor]:
    if call.gathered:
        assert results.values is not None
        out = torch.zeros_like(results.values, dtype=torch.float32)
        _support_backward(call, results, grads, out)
        return (out,)
    out = call.logits if call.inplace_backward else torch.empty_like(call.logits)
    # to the kernel of whole rows those with a support are ignored ones: it leaves zeros there
    whole = call if call.support_ids is None else call._replace(target_ids=unfiltered_ids(call))
    for part, of_part, upstream, into in _pieces(whole, results, grads, out):
        tile_backward(_tile(part), upstream, of_part, into)
    if call.support_ids is not None:
        for part, of_part, upstream, into in _pieces(call, results, grads, out):
            _support_backward(part, of_part, upstream, into)
    return (out,)


def _pieces(
    call: LogprobCall, results: LogprobResults, grads: RowGrads, out: Tensor
) -> Iterator[tuple[LogprobCall, LogprobResults, RowGrads, Tensor]]:
    """``call`` and what belongs to it, in pieces whose rows lie as one launch takes them."""
    if call.gathered or _rows(call.logits, out) is not None:
        yield call, results, grads, out
        return
    size = call.target_ids[0].numel()
    for i in range(len(call.target_ids)):
        part = _below(call, i, ("logits", "target_ids", "temperature"))
        if (offsets := call.support_offsets) is not None:
            part = part._replace(support_offsets=offsets[i * size : (i + 1) * size + 1])
        rows = _below(results, i, results._fields[:-1]), _below(grads, i, grads._fields)
        yield from _pieces(part, *rows, out[i])


def _below(record: Any, i: int, fields: tuple[str, ...]) -> Any:
    """``record`` with what is at index ``i`` of the first dimension of these tensors."""
    values = {name: getattr(record, name) for name in fields}
    return record._replace(**{name: x[i] for name, x in values.items() if isinstance(x, Tensor)})


def _support_forward(call: LogprobCall, results: LogprobResults) -> None:
    rows, inner, (strides,) = _support_rows(call, call.logits)
    if rows:
        with torch.cuda.device_of(call.logits):
            support_forward_kernel[(rows,)](
                call.logits, inner, *strides, call.logits.shape[-1], call.target_ids.contiguous(),
                call.ignore_index, *per_row(call.temperature), call.support_ids, call.support_offsets,
                results.values, *results.statistics, GATHERED=call.gathered, **SUPPORT,
            )  # fmt: skip


def _support_backward(call: LogprobCall, results: LogprobResults, grads: RowGrads, out: Tensor) -> None:
    rows, inner, (strides,) = _support_rows(call, out)
    if rows:
        with torch.cuda.device_of(out):
            support_backward_kernel[(rows,)](
                results.values, call.target_ids.contiguous(), call.ignore_index, *per_row(call.temperature),
                call.support_ids, call.support_offsets, *grads, results.logprobs,
                None if grads.entropy is None else results.entropy, results.row_max, results.log_sum, out,
                inner, *strides, out.shape[-1], SCATTERED=not call.gathered, **SUPPORT,
            )  # fmt: skip


def _support_rows(call: LogprobCall, x: Tensor) -> Any:
    return (call.target_ids.numel(), 1, [(0, 0)]) if call.gathered else _rows(x)


def tile_forward(tile: Tile, state: Tensor | None, first: bool, last: bool, results: LogprobResults) -> None:
    """Continue the rows' softmax with ``tile`` in ``state`` [4, R]; the last writes ``results``."""
    rows, inner, (strides,) = _rows(tile.logits)  # type: ignore[misc]
    vocab = tile.logits.shape[-1]
    lanes, vec, warps = _row_plan(vocab, tile.logits.dtype)
    scattered = any(x % 16 for x in (vocab, *strides, tile.logits.data_ptr()))
    if rows:
        with torch.cuda.device_of(tile.logits):
            forward_kernel[(rows,)](
                tile.logits, inner, *strides, vocab, *_head(tile),
                state, 0 if state is None else state.stride(0), *results.statistics,
                FIRST=first, LAST=last, SCATTERED=scattered, LANES=lanes, VEC=vec, num_warps=warps,
                enable_fp_fusion=False,
            )  # fmt: skip


def tile_backward(tile: Tile, grads: RowGrads, results: LogprobResults, out: Tensor) -> None:
    """Write the gradient of ``tile`` into ``out``, which may be the tile itself."""
    entropy = None if grads.entropy is None else results.entropy
    _elementwise(backward_kernel, tile, out, *grads, entropy, results.row_max, results.log_sum)


def tile_exp(tile: Tile, row_max: Tensor, out: Tensor) -> None:
    """Write ``exp((y - row_max) / T) * dy/dx / T`` into ``out``, 0 at the target and on ignored rows."""
    _elementwise(exp_kernel, tile, out, row_max)


def _elementwise(kernel: Any, tile: Tile, out: Tensor, *of_rows: Tensor | None) -> None:
    """Launch a kernel that makes of each entry of ``tile``, and of what its row has, one of ``out``."""
    rows, inner, (strides, out_strides) = _rows(tile.logits, out)  # type: ignore[misc]
    vocab = tile.logits.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.logits.dtype)
    spans = cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile.logits):
            kernel[(rows * spans,)](
                tile.logits, inner, *strides, vocab, *_head(tile), *of_rows, out, *out_strides, spans,
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


def _rows(*tensors: Tensor) -> tuple[int, int, list[tuple[int, int]]] | None:
    """``(rows, inner, [(outer_stride, inner_stride), ...])`` where row r of each tensor starts at
    ``r // inner * outer_stride + r % inner * inner_stride``; None where two strides do not suffice (more than
    two leading dimensions that do not continue each other): ``_pieces`` then makes a loop of launches."""
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
    lanes = max(32, min(512, next_power_of_2(cdiv(vocab, vec))))
    return lanes, vec, max(1, lanes // (64 if torch.version.hip is None else 128))


def _elementwise_plan(vocab: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(block, span, warps)``: a program takes ``span`` entries of a row, ``block`` at a time."""
    lanes, vec, warps = _row_plan(vocab, dtype)
    block = lanes * vec
    return block, min(4, cdiv(vocab, block)) * block, warps


def per_row(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)
