"""``logprob`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device.

Also the tile kernels of ``linear_logprob``: the same kernels on a slice of the vocabulary."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel import whole_rows
from rlkernel.native import kernels_for, launch, sampling

Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]
SupportStats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]

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


def forward(
    logits: Tensor, target_ids: Tensor, temperature: float | Tensor, ignore_index: int, return_entropy: bool
) -> Stats:
    logprobs = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    lse, row_max, log_sum = (torch.empty_like(logprobs) for _ in range(3))
    entropy = torch.empty_like(logprobs) if return_entropy else None
    target_ids = target_ids.contiguous()
    for part in _layout(logits):
        tile = _tile(logits, part, 0, target_ids, temperature, ignore_index)
        outputs = (_row(x, part) for x in (logprobs, entropy, lse, row_max, log_sum))
        launch("logprob_forward", logits.device, *tile, 0, 0, 0, 0, True, True, *outputs)
    return logprobs, entropy, lse, row_max, log_sum


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
    out = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    target_ids = target_ids.contiguous()
    for part in _layout(logits):
        tile = _tile(logits, part, 0, target_ids, temperature, ignore_index)
        rows = (_row(x, part) for x in (grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum))
        if inplace:
            address, outer, inner = tile[0], part.outer_stride, part.inner_stride
        else:
            inner = logits.shape[-1]
            address, outer = out.data_ptr() + part.first_row * inner * out.itemsize, part.inner * inner
        launch("logprob_backward", logits.device, *tile, *rows, address, DTYPES[out.dtype], outer, inner)
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
    """The kernel takes rows with a support, ``sampling``'s the whole ones: see the reference."""
    target_ids = target_ids.contiguous()
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32, device=logits.device)
    lse, row_max, log_sum = (torch.empty_like(logprobs) for _ in range(3))
    entropy = torch.empty_like(logprobs) if return_entropy else None
    values = logits.contiguous() if gathered else logits.new_zeros(support_ids.shape)
    vocab = 2**31 - 1 if gathered else logits.shape[-1]
    parts = _rows_of(target_ids) if gathered else _layout(logits)
    for part in parts:
        support = _support(part, vocab, target_ids, ignore_index, temperature, support_ids, support_offsets)
        address = 0 if gathered else logits.data_ptr() + part.offset * logits.itemsize
        rows = address, DTYPES[logits.dtype], part.inner, part.outer_stride, part.inner_stride
        outputs = (_row(x, part) for x in (logprobs, entropy, lse, row_max, log_sum))
        launch("logprob_support_forward", logits.device, *support, *rows, values.data_ptr(), *outputs)
    stats: Stats = (logprobs, entropy, lse, row_max, log_sum)
    if not gathered:
        options = target_ids, temperature, ignore_index, support_offsets
        stats = whole_rows.filled(sampling.forward, stats, logits, *options)
    return *stats, values


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
    target_ids = target_ids.contiguous()
    if out is None:
        out = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
    vocab = out.shape[-1] if scattered else 2**31 - 1
    for part in _layout(out) if scattered else _rows_of(target_ids):
        support = _support(part, vocab, target_ids, ignore_index, temperature, support_ids, support_offsets)
        columns = (grad_logprobs, grad_entropy, grad_lse, logprobs, entropy, row_max, log_sum)
        rows = (_row(x, part) for x in columns)
        address = out.data_ptr() + part.offset * out.itemsize
        target = address, DTYPES[out.dtype], scattered, part.inner, part.outer_stride, part.inner_stride
        source = values.data_ptr(), DTYPES[values.dtype]
        launch("logprob_support_backward", out.device, *support, *source, *rows, *target)
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
    """Take the logits ``tile`` [R, Vt] of the entries from ``vocab_start`` on into ``state``.

    That is [4, R]: maximum, sum, weighted sum and target's value of each row so far.  The first tile sets it,
    the last one also writes ``outputs``.
    """
    arguments = _tile(
        tile, _whole(tile), vocab_start, target_ids, temperature, ignore_index, bias, logit_scale, softcap
    )
    start, step = state.data_ptr(), state.stride(0) * state.itemsize
    states = range(start, start + 4 * step, step) if step else (start,) * 4
    launch("logprob_forward", tile.device, *arguments, *states, first, last, *map(_address, outputs))


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
    """Write the gradient of the GEMM's result to ``out`` [R, Vt], which may be ``tile`` itself."""
    arguments = _tile(
        tile, _whole(tile), vocab_start, target_ids, temperature, ignore_index, bias, logit_scale, softcap
    )
    rows = map(_address, (grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum))
    launch("logprob_backward", tile.device, *arguments, *rows, *_out(out))


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
    """Write ``exp((y - row_max) / T) * dy/dx / T`` to ``out`` [R, Vt]; 0 at targets and on ignored rows."""
    arguments = _tile(
        tile, _whole(tile), vocab_start, target_ids, temperature, ignore_index, bias, logit_scale, softcap
    )
    launch("logprob_exp", tile.device, *arguments, _address(row_max), *_out(out))


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


def _tile(
    logits: Tensor,
    layout: _Layout,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Any, ...]:
    """The fields of LogprobTile, in order."""
    per_row = temperature if isinstance(temperature, Tensor) else None
    return (
        logits.data_ptr() + layout.offset * logits.itemsize, DTYPES[logits.dtype], layout.rows, layout.inner,
        layout.outer_stride, layout.inner_stride, logits.shape[-1], vocab_start, _row(target_ids, layout),
        ignore_index, _row(per_row, layout), 1.0 if per_row is not None else temperature, _address(bias),
        logit_scale, softcap or 0.0,
    )  # fmt: skip


def _rows_of(target_ids: Tensor) -> Iterable[_Layout]:
    """The rows where no logits lie behind them."""
    rows = target_ids.numel()
    return (_Layout(rows, rows, 0, 0),) if rows else ()


def _support(
    layout: _Layout,
    vocab: int,
    target_ids: Tensor,
    ignore_index: int,
    temperature: float | Tensor,
    support_ids: Tensor,
    support_offsets: Tensor,
) -> tuple[Any, ...]:
    """The fields of LogprobSupport, in order."""
    per_row = temperature if isinstance(temperature, Tensor) else None
    return (
        layout.rows, vocab, _row(target_ids, layout), ignore_index, _row(per_row, layout),
        1.0 if per_row is not None else temperature, support_ids.data_ptr(), _row(support_offsets, layout),
    )  # fmt: skip


def _out(out: Tensor) -> tuple[int, int, int, int]:
    return out.data_ptr(), DTYPES[out.dtype], 0, out.stride(0)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _row(x: Tensor | None, layout: _Layout) -> int:
    return 0 if x is None else x.data_ptr() + layout.first_row * x.itemsize
