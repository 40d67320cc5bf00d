"""``divergence`` over Triton: each way one launch, which reads both rows, Jensen and Shannon's forward twice."""

import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults
from rlkernel.triton_ops import divergence_kernels as kernels
from rlkernel.triton_ops._device import taking_logits
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.rms_norm import rows_of


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits, teacher_logits = tensors
    return taking_logits(logits) or taking_logits(teacher_logits)


def forward(call: DivergenceCall) -> DivergenceResults:
    logits, vocab = call.logits, call.logits.shape[-1]
    row = functools.partial(torch.empty, logits.shape[:-1], dtype=torch.float32, device=logits.device)
    entropy = row() if call.return_entropy else None
    results = DivergenceResults(row(), entropy, row(), row(), row(), row(), row() if call.beta else None)
    pair = rows_of(logits), rows_of(call.teacher_logits)
    lanes, vec, warps = _plan(call)
    scattered = any(n % 16 for x, _, outer, step in pair for n in (outer, step, x.data_ptr())) or vocab % 16 != 0
    if logits.numel():
        with torch.cuda.device_of(logits):
            kernels.divergence_forward_kernel[(logits.numel() // vocab,)](
                *pair[0], *pair[1], call.mask, vocab, call.temperature, call.beta, *results, **_kind(call),
                SCATTERED=scattered, LANES=lanes, VEC=vec, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return results


def backward(call: DivergenceCall, results: DivergenceResults, grad: Tensor) -> Tensor:
    logits, vocab = call.logits, call.logits.shape[-1]
    out = logits if call.inplace_backward else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x = rows_of(logits)
    into = x if call.inplace_backward else rows_of(out)
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
    made = into[0]
    return out if made.data_ptr() == out.data_ptr() else out.copy_(made.view(out.shape))


def _kind(call: DivergenceCall) -> dict[str, bool]:
    return {"FORWARD": call.beta == 0, "REVERSE": call.beta == 1}


def _plan(call: DivergenceCall) -> tuple[int, int, int]:
    """``(lanes, vec, warps)``: a lane takes one load of 16 bytes a block of the wider of the two rows.

    They follow from V and the dtypes alone, and so do the bits; warps are free to differ.
    """
    vec = 16 // max(call.logits.dtype.itemsize, call.teacher_logits.dtype.itemsize)
    lanes = max(32, min(512, next_power_of_2(cdiv(call.logits.shape[-1], vec))))
    return lanes, vec, max(1, lanes // (64 if torch.version.hip is None else 128))
