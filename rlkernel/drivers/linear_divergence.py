"""``linear_divergence`` in tiles: library GEMMs into the workspace, then the kernels of ``divergence``.

Forward takes whole rows of both logits, as many as the workspace holds, so that Jensen and Shannon's, which
reads them twice, needs no second product.  Backward computes them again, one slice of the vocabulary outside
and its rows inside, as ``linear_logprob`` does: the weight's gradient is summed in fp32 a slice at a time.

FLOPs: 2 N H V a GEMM of the student, 2 N K V of the teacher; forward one of each, backward one of each again
and two more of the student, for hidden and weight.
Bytes beside the GEMMs, all fp32: each reads its logits once or twice; backward writes a gradient over them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceResults
from rlkernel.calls.linear_divergence import LinearDivergenceCall
from rlkernel.calls.linear_logprob import Head, LinearGrads
from rlkernel.drivers.linear_chosen import Chosen, choose, operations
from rlkernel.drivers.linear_divergence_plan import backward_plan, forward_plans
from rlkernel.drivers.linear_gradients import head_gradients
from rlkernel.drivers.linear_products import Scratch, rows_of, scatter, select
from rlkernel.runtime import workspace


def forward(kernels: Any, call: LinearDivergenceCall) -> DivergenceResults:
    """The forward pass of every backend that has kernels of ``divergence``."""
    count = call.hidden.shape[0]
    rows, mask = _chosen(call, call.mask, 1)
    n = count if rows is None else rows.numel()
    results = DivergenceResults.of_rows(call.hidden, (n,), call.wide, call)
    student, teacher = (
        Scratch(hidden, weight, head, n, rows is not None, gradients=False, plan=plan, whole_rows=True)
        for (hidden, weight, head), plan in zip(_models(call), forward_plans(call), strict=True)
    )
    with _side_by_side(student, teacher):
        for a, b in student.chunks():
            logits, other = (_whole_rows(scratch, rows, a, b) for scratch in (student, teacher))
            there = DivergenceResults(*(rows_of(x, a, b) for x in results))
            kernels.forward_into(call.of_logits(logits, other, rows_of(mask, a, b)), there)
    return DivergenceResults(*(scatter(x, rows, count) for x in results))


def backward(
    kernels: Any, call: LinearDivergenceCall, results: DivergenceResults, grad: Tensor
) -> LinearGrads:
    """The backward pass of every backend that has kernels of ``divergence``."""
    (hidden, weight, head), (teacher_hidden, teacher_weight, teacher_head) = _models(call)
    wanted = grad != 0 if call.mask is None else call.mask & (grad != 0)
    rows, mask = _chosen(call, wanted, 2 + int(call.needs[0]) + int(call.needs[1]))
    n = hidden.shape[0] if rows is None else rows.numel()
    plan, gathered = backward_plan(call, n), rows is not None
    teacher = Scratch(teacher_hidden, teacher_weight, teacher_head, n, gathered, gradients=False, plan=plan)
    student = Scratch(
        hidden, weight, head, n, gathered, gradients=True, hidden_gradient=call.needs[0],
        weight_gradient=call.needs[1], plan=plan, mask=mask if call.needs[1] else None, beside=teacher.size,
    )  # fmt: skip
    stats = [select(x, rows) for x in results]
    upstream = select(grad if mask is None else torch.where(mask, grad, 0), rows)
    if head.softcap is None and head.logit_scale != 1:
        upstream = upstream * head.logit_scale
    with _side_by_side(student, teacher):
        of_teacher = _Slices(teacher)

        def fill(logits: Tensor, v0: int, v1: int, a: int, b: int, dz: Tensor) -> None:
            _finish(logits, head, v0, v1)
            other = teacher.logits(teacher.hidden(rows, a, b), of_teacher.of(v0, v1), v0, a)
            _finish(other, teacher_head, v0, v1)
            asked = call.of_logits(logits, other, None)
            there = DivergenceResults(*(rows_of(x, a, b) for x in stats))
            if head.softcap is None:
                kernels.gradient_into(asked, there, rows_of(upstream, a, b), dz)
                return
            kernels.gradient_into(asked, there, rows_of(upstream, a, b), other)
            slope = logits.div_(head.softcap).square_().neg_().add_(1).mul_(head.logit_scale)
            if mask is not None:  # where 0 would be multiplied with what is not a number
                slope.masked_fill_(~mask[a:b, None], 0)
            torch.mul(other, slope, out=dz)

        bias_dtype = None if call.bias is None else call.bias.dtype
        return head_gradients(student, rows, call.needs, bias_dtype, fill)


class _Slices:
    """Slices of the teacher's weight as operands, of which one is there at a time."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch, self._held = scratch, torch.empty(0, dtype=torch.float32, device="cpu")
        self._place = -1, -1

    def of(self, v0: int, v1: int) -> Tensor:
        if self._place != (v0, v1):
            self._place, self._held = (v0, v1), self._scratch.weight_slice(v0, v1)
        return self._held


def _models(call: LinearDivergenceCall) -> tuple[tuple[Tensor, Tensor, Head], tuple[Tensor, Tensor, Head]]:
    """Of the student and of the teacher, with the biases as they are added to logits."""
    own, other = (
        head if head.bias is None else head._replace(bias=head.bias.to(call.wide)) for head in call.heads
    )
    return (call.hidden, call.weight, own), (call.teacher_hidden, call.teacher_weight, other)


def _chosen(call: LinearDivergenceCall, wanted: Tensor | None, products: int) -> Chosen:
    """The rows to compute, of products whose operations are the student's, about."""
    if wanted is None:
        return Chosen()
    return choose(wanted, operations(call.weight, call.heads[0], wanted.shape[0], products))


@contextlib.contextmanager
def _side_by_side(student: Scratch, teacher: Scratch) -> Iterator[None]:
    """Both in one lease, which a second would take from the first."""
    with workspace.lease(student.size + teacher.size, student.source.device) as lease:
        student.place(lease.memory[: student.size])
        teacher.place(lease.memory[student.size :])
        try:
            yield
        finally:  # no part outlives the lease
            student.let_go()
            teacher.let_go()


def _whole_rows(scratch: Scratch, rows: Tensor | None, a: int, b: int) -> Tensor:
    """The logits [b - a, V] of a chunk."""
    h = scratch.hidden(rows, a, b)
    for v0, v1, w in scratch.weight_slices():
        _finish(scratch.logits(h, w, v0, a), scratch.head, v0, v1)
    return scratch.rows_of_logits(b - a)


def _finish(logits: Tensor, head: Head, v0: int, v1: int) -> None:
    """From what the product gave to the logits, where they are."""
    if head.bias is not None:
        logits.add_(rows_of(head.bias, v0, v1))
    if head.logit_scale != 1:
        logits.mul_(head.logit_scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
