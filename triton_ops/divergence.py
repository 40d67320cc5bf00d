"""``divergence`` over Triton: one launch each way over both rows, which Jensen and Shannon's reads twice, as
KL's does where it is small."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults
from rlkernel.triton_ops import divergence_kernels as kernels
from rlkernel.triton_ops._device import taking_logits
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.rms_norm import rows_of

Rows = tuple[Tensor | None, int, int, int]  # a tensor, and the strides of its rows


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits, teacher_logits = tensors
    return taking_logits(logits) or taking_logits(teacher_logits)


def forward(call: DivergenceCall) -> DivergenceResults:
    results = DivergenceResults.empty(call)
    forward_into(call, results)
    return results


def forward_into(call: DivergenceCall, results: DivergenceResults) -> None:
    logits, vocab = call.logits, call.logits.shape[-1]
    lanes, vec, warps = _plan(call)
    if logits.numel():
        x, y = rows_of(logits), rows_of(call.teacher_logits)
        with torch.cuda.device_of(logits):
            kernels.divergence_forward_kernel[(logits.numel() // vocab,)](
                *x, *y, call.mask, vocab, call.temperature, call.beta, *results, **_kind(call),
                SCATTERED=_is_scattered(vocab, x, y), LANES=lanes, VEC=vec, num_warps=warps,
                enable_fp_fusion=False,
            )  # fmt: skip


def backward(call: DivergenceCall, results: DivergenceResults, grad: Tensor) -> Tensor:
    logits = call.logits
    x = rows_of(logits)
    if call.inplace_backward:
        assert x[0] is not None
        out, into = x[0], x  # the logits, or a copy of them in rows
    else:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        into = rows_of(out)
    _launch_backward(call, results, grad, x, into)
    if call.inplace_backward and out.data_ptr() != logits.data_ptr():
        return logits.copy_(out.view(logits.shape))
    return logits if call.inplace_backward else out


def gradient_into(call: DivergenceCall, results: DivergenceResults, grad: Tensor, out: Tensor) -> None:
    """The gradient of the logits, to ``out`` of any dtype, which may be either of the two logits."""
    _launch_backward(call, results, grad, rows_of(call.logits), rows_of(out))


def _launch_backward(
    call: DivergenceCall, results: DivergenceResults, grad: Tensor, x: Rows, into: Rows
) -> None:
    logits, vocab = call.logits, call.logits.shape[-1]
    lanes, vec, warps = _plan(call)
    block = lanes * vec
    span = min(4, cdiv(vocab, block)) * block
    spans = cdiv(vocab, span)
    if logits.numel():
        with torch.cuda.device_of(logits):
            kernels.divergence_backward_kernel[(logits.numel() // vocab * spans,)](
                *x, *rows_of(call.teacher_logits), call.mask, vocab, call.temperature, call.beta, grad,
                *results[2:], *into, spans, **_kind(call), SPAN=span, BLOCK=block, num_warps=warps,
                enable_fp_fusion=False,
            )  # fmt: skip


def _is_scattered(vocab: int, *tensors: Rows) -> bool:
    """Whether a row does not start, or end, at a multiple of 16 elements."""
    return vocab % 16 != 0 or any(
        n % 16 for x, _, outer, step in tensors if x is not None for n in (outer, step, x.data_ptr())
    )


def _kind(call: DivergenceCall) -> dict[str, bool]:
    return {"FORWARD": call.beta == 0, "REVERSE": call.beta == 1}


def _plan(call: DivergenceCall) -> tuple[int, int, int]:
    """``(lanes, vec, warps)``: a lane takes one load of 16 bytes a block of the wider of the two rows.

    A thread has one lane: of both rows that is as much in flight as logprob has, and two would be more
    registers than 1024 threads of a multiprocessor have.  The bits follow from lanes and vec.
    """
    vec = 16 // max(call.logits.dtype.itemsize, call.teacher_logits.dtype.itemsize)
    lanes = max(32, min(256, next_power_of_2(cdiv(call.logits.shape[-1], vec))))
    return lanes, vec, max(1, lanes // (32 if torch.version.hip is None else 64))
