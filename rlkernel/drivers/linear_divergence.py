"""``linear_divergence`` in tiles: library GEMMs into the workspace, then the kernels of ``divergence``.

Forward takes whole rows of both logits, as many as the workspace holds, so that Jensen and Shannon's, which
reads them twice, needs no second product; with a frozen head it makes the direction of the hidden gradient of
them, too.  Where all rows were there at once, backward finds them there.  Else it computes them again, one
slice of the vocabulary outside and its rows inside, as ``linear_logprob`` does: the weight's gradient is
summed in fp32 a slice at a time.

FLOPs: 2 N H V a GEMM of the student, 2 N K V of the teacher; forward one of each, backward two of the
student, for hidden and weight, and one of each again where logits are not there any more; with a frozen head
two of the student and one of the teacher in all.
Bytes beside the GEMMs, all fp32: each reads its logits once or twice; backward writes a gradient over them.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults
from rlkernel.calls.linear_divergence import LinearDivergenceCall, LinearDivergenceResults
from rlkernel.calls.linear_logprob import Head, LinearGrads, Needs
from rlkernel.drivers.linear_chosen import Chosen, choose, operations
from rlkernel.drivers.linear_divergence_plan import backward_plan, forward_plan, row_pitch
from rlkernel.drivers.linear_gradients import head_gradients
from rlkernel.drivers.linear_products import Scratch, rows_of, scatter, select
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.runtime import gpu, workspace
from rlkernel.runtime.workspace import Carver


def forward(kernels: Any, call: LinearDivergenceCall) -> LinearDivergenceResults:
    """The forward pass of every backend that has kernels of ``divergence``.

    With ``keep`` the workspace holds on to the logits of all rows for a backward pass that follows at once.
    """
    count, device = call.hidden.shape[0], call.hidden.device
    rows, mask = _chosen(call, call.mask, 1)
    n, plan = count if rows is None else rows.numel(), forward_plan(call)
    results = DivergenceResults.of_rows(call.hidden, (n,), call.wide, call)
    direction, run = None, None
    if call.need_direction:
        ones = torch.ones_like(results.row_max) if mask is None else mask.to(call.wide)
        run = _Pass(kernels, call, rows, mask, results, ones)
        direction = (call.hidden.new_empty if rows is None else call.hidden.new_zeros)(call.hidden.shape)
    pair = _Pair(call, n, rows is not None, plan, whole_rows=True, direction=call.need_direction)
    keep = call.keep and not gpu.capturing(device)
    held = _held_until_backward(call, n, rows is not None) if keep else 0
    with pair.placed(max(pair.size, held)):
        for a, b in pair.student.chunks():
            logits, other = (_whole_rows(pair, model, rows, a, b) for model in range(2))
            there = DivergenceResults(*(rows_of(x, a, b) for x in results))
            kernels.forward_into(call.of_logits(logits, other, rows_of(mask, a, b)), there)
            if run is not None and direction is not None:
                _direct(run, pair, a, b, direction)
        found = DivergenceResults(*(scatter(x, rows, count) for x in results))
        if held:
            workspace.keep(device, found.sum_exp, pair.front, n)
    return LinearDivergenceResults(*found, direction)


def backward(
    kernels: Any, call: LinearDivergenceCall, results: LinearDivergenceResults, grad: Tensor
) -> LinearGrads:
    """The backward pass of every backend that has kernels of ``divergence``."""
    if results.direction is not None:
        row = grad[:, None]
        return LinearGrads(torch.where(row == 0, 0, row * results.direction).to(call.hidden.dtype))
    wanted = grad != 0 if call.mask is None else call.mask & (grad != 0)
    rows, mask = _chosen(call, wanted, 2 + int(call.needs[0]) + int(call.needs[1]))
    n, device, owner = call.hidden.shape[0] if rows is None else rows.numel(), grad.device, results.sum_exp
    upstream = select(grad if mask is None else torch.where(mask, grad, 0), rows)
    stats = DivergenceResults(*(select(x, rows) for x in results.of_rows))
    made = functools.partial(
        _Pair, call, n, rows is not None, needs=call.needs, mask=mask if call.needs[1] else None
    )
    run = _Pass(kernels, call, rows, mask, stats, upstream)
    plan, is_held = backward_plan(call, n), bool(_held_until_backward(call, n, rows is not None))
    if is_held:  # whether they are there still or not, in the same tiles and so with the same bits
        plan = forward_plan(call)
    # rows of a gradient are among those of forward: as many are the same
    if is_held and not gpu.capturing(device) and workspace.kept_for(device, owner) == n:
        pair = made(plan=plan, whole_rows=True)
        with pair.placed(pair.size - pair.front, owner) as there:
            if there:  # no other lease came between
                return _gradients(run, pair, known=True)
    pair = made(plan=plan, whole_rows=False)
    with pair.placed(pair.size):
        return _gradients(run, pair, known=False)


def _held_until_backward(call: LinearDivergenceCall, n: int, gathered: bool) -> int:
    """The bytes of a workspace that holds the logits of all rows, and beside them what backward needs.

    0 where that is more than the limit."""
    plan, device = forward_plan(call), call.hidden.device
    if not 0 < n <= plan.tokens:
        return 0
    # a GPU's rows without a gradient may be operands of 0, for which there is memory where any mask is given
    mask = call.hidden if gpu.runs_ahead(device) else None
    pair = _Pair(call, n, gathered, plan, whole_rows=True, needs=(True, True, True), mask=mask)
    return pair.size if pair.size <= workspace.limit(device) else 0


class _Pair:
    """Both models' parts of one lease, which a second would take from the first; with ``whole_rows``, in
    front of them the logits of a chunk's rows."""

    def __init__(
        self, call: LinearDivergenceCall, n: int, gathered: bool, plan: Tile, *, whole_rows: bool,
        needs: Needs = (False, False, False), mask: Tensor | None = None, direction: bool = False,
    ) -> None:  # fmt: skip
        (hidden, weight, head), (teacher_hidden, teacher_weight, teacher_head) = _models(call)
        self._n = min(n, plan.tokens)
        self._vocab, self._dtype, self._whole_rows = weight.shape[0], call.wide, whole_rows
        self.rows: tuple[Tensor | None, Tensor | None] = (None, None)
        carver = Carver()
        self._carve(carver)
        self.front = carver.size
        self.teacher = Scratch(
            teacher_hidden, teacher_weight, teacher_head, n, gathered, gradients=False, plan=plan,
            whole_rows=whole_rows,
        )  # fmt: skip
        self.student = Scratch(
            hidden, weight, head, n, gathered, gradients=any(needs) or direction,
            hidden_gradient=needs[0] or direction, weight_gradient=needs[1], plan=plan, mask=mask,
            whole_rows=whole_rows, beside=self.teacher.size,
        )  # fmt: skip
        self.size = self.front + self.student.size + self.teacher.size

    def _carve(self, carver: Carver) -> None:
        if self._whole_rows:
            pitch = row_pitch(self._vocab)
            student, teacher = (carver.part(self._n, pitch, dtype=self._dtype) for _ in range(2))
            self.rows = student[..., : self._vocab], teacher[..., : self._vocab]

    @contextlib.contextmanager
    def placed(self, size: int, owner: Tensor | None = None) -> Iterator[bool]:
        """In a lease of ``size`` bytes, or behind the logits that an earlier one kept for ``owner``: where it
        has lost them, False and no part is there."""
        with workspace.lease(size, self.student.source.device, owner) as lease:
            if owner is not None and lease.kept != self.front:
                yield False
                return
            self._carve(Carver(lease.memory))
            end = self.front + self.student.size
            self.student.place(lease.memory[self.front : end], self.rows[0], owner is not None)
            self.teacher.place(lease.memory[end:], self.rows[1], owner is not None)
            try:
                yield True
            finally:  # no part outlives the lease
                self.student.let_go()
                self.teacher.let_go()
                self.rows = None, None


def _whole_rows(pair: _Pair, model: int, rows: Tensor | None, a: int, b: int) -> Tensor:
    """The logits [b - a, V] of a chunk."""
    scratch, logits = (pair.student, pair.teacher)[model], pair.rows[model]
    assert logits is not None
    h = scratch.hidden(rows, a, b)
    for v0, v1, w in scratch.weight_slices():
        _finish(scratch.logits(h, w, v0, a), scratch.head, v0, v1)
    return rows_of(logits, 0, b - a)


class _Pass(NamedTuple):
    """One over some rows, from their logits to gradients."""

    kernels: Any
    call: LinearDivergenceCall
    rows: Tensor | None  # of the hidden states; None: all
    mask: Tensor | None  # of these rows, those that count; None: all
    stats: DivergenceResults  # of these rows
    upstream: Tensor  # of these rows, 0 where they do not count

    def fill(self, asked: DivergenceCall, head: Head, a: int, b: int, dz: Tensor) -> None:
        """The gradient of what the product gave of the rows [a, b), to ``dz``; both logits may be lost."""
        stats = DivergenceResults(*(rows_of(x, a, b) for x in self.stats))
        upstream = rows_of(self.upstream, a, b)
        if head.softcap is None:
            self.kernels.gradient_into(asked, stats, upstream * head.logit_scale, dz)
            return
        logits, other = asked.logits, asked.teacher_logits
        self.kernels.gradient_into(asked, stats, upstream, other)
        slope = logits.div_(head.softcap).square_().neg_().add_(1).mul_(head.logit_scale)
        if self.mask is not None:  # where 0 would be multiplied with what is not a number
            slope.masked_fill_(~self.mask[a:b, None], 0)
        torch.mul(other, slope, out=dz)


def _direct(run: _Pass, pair: _Pair, a: int, b: int, direction: Tensor) -> None:
    """The gradients of the hidden states of a chunk's rows, from the logits that are there."""
    scratch, (logits, other) = pair.student, pair.rows
    assert logits is not None and other is not None
    sums = scratch.round_sums(direction, a, b, a)
    for v0, v1, w in scratch.weight_slices():
        tile, beside = (rows_of(x, 0, b - a)[:, v0:v1] for x in (logits, other))
        dz = scratch.gradient(tile)
        run.fill(run.call.of_logits(tile, beside, None), scratch.head, a, b, dz)
        scratch.accumulate(sums, dz, w, v0 == 0)
    scratch.store_round(direction, run.rows, a, b, sums)


def _gradients(run: _Pass, pair: _Pair, known: bool) -> LinearGrads:
    """From logits that are ``known`` or are multiplied again."""
    student, teacher = pair.student, pair.teacher
    of_teacher = _Slices(teacher)

    def fill(logits: Tensor, v0: int, v1: int, a: int, b: int, dz: Tensor) -> None:
        if known:
            assert pair.rows[1] is not None
            other = pair.rows[1][a:b, v0:v1]
        else:
            other = teacher.logits(teacher.hidden(run.rows, a, b), of_teacher.of(v0, v1), v0, a)
            _finish(logits, student.head, v0, v1)
            _finish(other, teacher.head, v0, v1)
        run.fill(run.call.of_logits(logits, other, None), student.head, a, b, dz)

    bias_dtype = None if run.call.bias is None else run.call.bias.dtype
    return head_gradients(student, run.rows, run.call.needs, bias_dtype, fill)


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


def _finish(logits: Tensor, head: Head, v0: int, v1: int) -> None:
    """From what the product gave to the logits, where they are."""
    if head.bias is not None:
        logits.add_(rows_of(head.bias, v0, v1))
    if head.logit_scale != 1:
        logits.mul_(head.logit_scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
