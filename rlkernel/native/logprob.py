"""``logprob`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device.

Also the tile kernels of ``linear_logprob``: the same kernels on a slice of the vocabulary."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads, Tile
from rlkernel.drivers.logprob import unfiltered_ids, with_unfiltered_rows
from rlkernel.native import kernels_for, launch, sampling

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # rlkernel::Dtype


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits = tensors[0]
    reasons = unsupported_tensor("logits", logits)
    if logits.dim() and logits.shape[-1] > 1 and logits.stride(-1) != 1:
        reasons.append(f"the last stride of logits must be 1, got {logits.stride(-1)}")
    return reasons


def unsupported_tensor(name: str, tensor: Tensor) -> list[str]:
    """The reasons that dtype and device give."""
    reasons = []
    if tensor.dtype not in DTYPES:
        reasons.append(f"{name} must be fp16, bf16 or fp32, got {str(tensor.dtype).removeprefix('torch.')}")
    kernels = kernels_for(tensor.device)
    if isinstance(kernels, str):
        reasons.append(kernels)
    return reasons


def forward(call: LogprobCall) -> LogprobResults:
    if call.support_ids is not None:
        return _supported(call)
    logits = call.logits
    results = _empty(call)
    tile = _tile(call)
    for part in _layout(logits):
        outputs = (_row(x, part) for x in results[:5])
        launch("logprob_forward", logits.device, *_fields(tile, part), 0, 0, 0, 0, True, True, *outputs)
    return results


def backward(call: LogprobCall, results: LogprobResults, grads: RowGrads) -> tuple[Tensor]:
    if call.gathered:
        assert results.values is not None
        out = torch.zeros(results.values.shape, dtype=torch.float32, device=results.values.device)
        _support_backward(call, results, grads, out, _rows_of(call.target_ids))
        return (out,)
    logits, inplace = call.logits, call.inplace_backward
    out = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    # to the kernel of whole rows those with a support are ignored ones: it leaves zeros there
    tile = _tile(call if call.support_ids is None else call._replace(target_ids=unfiltered_ids(call)))
    stats = results.entropy, results.row_max, results.log_sum
    for part in _layout(logits):
        rows = (_row(x, part) for x in (*grads, *stats))
        if inplace:
            address, outer, inner = (
                logits.data_ptr() + part.offset * logits.itemsize,
                part.outer_stride,
                part.inner_stride,
            )
        else:
            inner = logits.shape[-1]
            address, outer = out.data_ptr() + part.first_row * inner * out.itemsize, part.inner * inner
        launch(
            "logprob_backward",
            logits.device,
            *_fields(tile, part),
            *rows,
            address,
            DTYPES[out.dtype],
            outer,
            inner,
        )
    if call.support_ids is not None:
        _support_backward(call, results, grads, out, _layout(out))
    return (out,)


def _supported(call: LogprobCall) -> LogprobResults:
    """The kernel takes rows with a support, ``sampling``'s the others: see the reference."""
    call, logits = _dense(call), call.logits
    assert call.support_ids is not None
    values = logits.contiguous() if call.gathered else logits.new_zeros(call.support_ids.shape)
    results = _empty(call)._replace(values=values)
    for part in _rows_of(call.target_ids) if call.gathered else _layout(logits):
        address = 0 if call.gathered else logits.data_ptr() + part.offset * logits.itemsize
        rows = address, DTYPES[logits.dtype], part.inner, part.outer_stride, part.inner_stride
        outputs = (_row(x, part) for x in results[:5])
        support = _support(call, part, logits.shape[-1])
        launch("logprob_support_forward", logits.device, *support, *rows, values.data_ptr(), *outputs)
    return results if call.gathered else with_unfiltered_rows(sampling.forward, results, call)


def _support_backward(
    call: LogprobCall, results: LogprobResults, grads: RowGrads, out: Tensor, parts: Iterable["_Layout"]
) -> None:
    """Add the gradients of rows with a support to ``out``: [..., V], or [nnz] where logits are gathered."""
    call, values = _dense(call), results.values
    assert values is not None
    for part in parts:
        support = _support(call, part, out.shape[-1])
        columns = *grads, results.logprobs, results.entropy, results.row_max, results.log_sum
        rows = (_row(x, part) for x in columns)
        address = out.data_ptr() + part.offset * out.itemsize
        strides = part.inner, part.outer_stride, part.inner_stride
        target = address, DTYPES[out.dtype], not call.gathered, *strides
        source = values.data_ptr(), DTYPES[values.dtype]
        launch("logprob_support_backward", out.device, *support, *source, *rows, *target)


def tile_forward(tile: Tile, state: Tensor, first: bool, last: bool, results: LogprobResults) -> None:
    """Take the logits of ``tile`` into ``state`` [4, R]: maximum, sum, weighted sum and target's value of
    each row so far.  The first tile sets it, the last one also writes ``results``."""
    start, step = state.data_ptr(), state.stride(0) * state.itemsize
    states = range(start, start + 4 * step, step) if step else (start,) * 4
    outputs = map(_address, results[:5])
    launch("logprob_forward", tile.logits.device, *_fields(tile), *states, first, last, *outputs)


def tile_backward(tile: Tile, grads: RowGrads, results: LogprobResults, out: Tensor) -> None:
    """Write the gradient of the GEMM's result to ``out`` [R, Vt], which may be ``tile.logits`` itself."""
    rows = map(_address, (*grads, results.entropy, results.row_max, results.log_sum))
    launch("logprob_backward", tile.logits.device, *_fields(tile), *rows, *_out(out))


def tile_exp(tile: Tile, row_max: Tensor, out: Tensor) -> None:
    """Write ``exp((y - row_max) / T) * dy/dx / T`` to ``out`` [R, Vt]; 0 at targets and on ignored rows."""
    launch("logprob_exp", tile.logits.device, *_fields(tile), _address(row_max), *_out(out))


class _Layout(NamedTuple):
    """Rows of one launch: row r is at offset + r // inner * outer_stride + r % inner * inner_stride."""

    rows: int
    inner: int
    outer_stride: int
    inner_stride: int
    offset: int = 0  # of the first row, in elements
    first_row: int = 0  # among all rows of the tensor


def _whole(tile: Tensor) -> _Layout:
    return _Layout(tile.shape[0], max(tile.shape[0], 1), 0, tile.stride(0))


def _layout(x: Tensor) -> Iterable[_Layout]:
    """The rows of ``x`` [..., V], neither copied nor reshaped."""
    if x.numel() == 0:
        return ()
    if x.is_contiguous():
        vocab = x.shape[-1]
        rows = x.numel() // vocab
        return (_Layout(rows, rows, 0, vocab),)
    return _loops(x)


def _loops(x: Tensor) -> Iterator[_Layout]:
    """Dimensions that continue each other are one; two of the rest are the launch's, more are a loop."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size > 1:
            dims.append((size, stride))
    dims = [(1, 0), (1, 0), *dims] if len(dims) < 2 else dims
    *loops, (outer, outer_stride), (inner, inner_stride) = dims
    rows = outer * inner
    for k, index in enumerate(itertools.product(*(range(size) for size, _ in loops))):
        offset = sum(i * stride for i, (_, stride) in zip(index, loops, strict=True))
        yield _Layout(rows, inner, outer_stride, inner_stride, offset, k * rows)


def _empty(call: LogprobCall) -> LogprobResults:
    logprobs = torch.empty(call.target_ids.shape, dtype=torch.float32, device=call.logits.device)
    lse, row_max, log_sum = (torch.empty_like(logprobs) for _ in range(3))
    entropy = torch.empty_like(logprobs) if call.return_entropy else None
    return LogprobResults(logprobs, entropy, lse, row_max, log_sum)


def _dense(call: LogprobCall) -> LogprobCall:
    return call if call.target_ids.is_contiguous() else call._replace(target_ids=call.target_ids.contiguous())


def _tile(call: LogprobCall) -> Tile:
    return Tile(call.logits, 0, call.target_ids.contiguous(), call.temperature, call.ignore_index)


def _fields(tile: Tile, layout: _Layout | None = None) -> tuple[Any, ...]:
    """The fields of LogprobTile, in order."""
    logits, t = tile.logits, tile.temperature
    per_row = t if isinstance(t, Tensor) else None
    layout = _whole(logits) if layout is None else layout
    return (
        logits.data_ptr() + layout.offset * logits.itemsize, DTYPES[logits.dtype], layout.rows, layout.inner,
        layout.outer_stride, layout.inner_stride, logits.shape[-1], tile.vocab_start,
        _row(tile.target_ids, layout), tile.ignore_index, _row(per_row, layout),
        1.0 if per_row is not None else t, _address(tile.bias), tile.logit_scale, tile.softcap or 0.0,
    )  # fmt: skip


def _rows_of(target_ids: Tensor) -> Iterable[_Layout]:
    """The rows where no logits lie behind them."""
    rows = target_ids.numel()
    return (_Layout(rows, rows, 0, 0),) if rows else ()


def _support(call: LogprobCall, layout: _Layout, vocab: int) -> tuple[Any, ...]:
    """The fields of LogprobSupport, in order."""
    per_row = call.temperature if isinstance(call.temperature, Tensor) else None
    assert call.support_ids is not None
    return (
        layout.rows, 2**31 - 1 if call.gathered else vocab, _row(call.target_ids, layout),
        call.ignore_index, _row(per_row, layout), 1.0 if per_row is not None else call.temperature,
        call.support_ids.data_ptr(), _row(call.support_offsets, layout),
    )  # fmt: skip


def _out(out: Tensor) -> tuple[int, int, int, int]:
    return out.data_ptr(), DTYPES[out.dtype], 0, out.stride(0)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _row(x: Tensor | None, layout: _Layout) -> int:
    return 0 if x is None else x.data_ptr() + layout.first_row * x.itemsize
