"""``linear_policy_loss`` in tiles: the loss and its gradients from logits that are computed once.

The passes of ``linear_logprob`` with the loops changed: a chunk of rows outside, the vocabulary inside, so
that the logits of the chunk's rows are still in the workspace when their derivative is known.  The tiles,
their GEMMs and the order in which a row's statistics are merged are those of ``linear_logprob``: its
logprobs have the same bits.

FLOPs: 2 N H V a GEMM, three of them: logits, hidden, weight; four, in two passes, where the workspace does
not hold the logits of as many whole rows as the loss needs at once.
"""

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall, LinearPolicyLossResults
from rlkernel.calls.logprob import LogprobResults, RowGrads, State
from rlkernel.drivers import linear_logprob
from rlkernel.drivers.linear_policy_loss_pass import PolicyPass
from rlkernel.drivers.linear_policy_loss_plan import Plan, Resident, Step
from rlkernel.drivers.linear_products import rows_of, select

_log = logging.getLogger("rlkernel")


def forward(
    kernels: Any, loss: ModuleType, call: LinearPolicyLossCall, fused: ModuleType | None = None
) -> LinearPolicyLossResults:
    """The forward pass of every tiled backend, by its kernels of ``logprob`` and its module of
    ``policy_loss``; or both passes of ``fused``, its ``linear_logprob``."""
    policy, algorithm = PolicyPass(loss, call), call.algorithm
    if fused is not None:
        return _two_passes(_Passes(fused.forward, fused.backward), call, policy, False)
    tiled = _Passes(
        functools.partial(linear_logprob.forward, kernels),
        functools.partial(linear_logprob.backward, kernels),
    )
    frozen_head = call.needs == (True, False, False) and not call.policy.entropy_gradient
    if not any(call.needs) or (frozen_head and algorithm != "one_pass"):
        # with a frozen head, linear_logprob's forward pass makes the direction of d hidden: two GEMMs
        return _two_passes(tiled, call, policy, frozen_head)
    plan = Plan(call, policy)
    if algorithm == "one_pass" and plan.obstacle:
        raise ValueError(f"algorithm must be 'auto' or 'two_pass' here, got 'one_pass': {plan.obstacle}")
    if algorithm == "two_pass" or plan.obstacle:
        _log.debug("linear_policy_loss in two passes: %s", plan.obstacle or "as asked")
        return _two_passes(tiled, call, policy, False)
    _log.debug("linear_policy_loss in one pass: %d rows at a time", plan.blocks * plan.scratch.plan.tokens)
    return _OnePass(kernels, call, plan).run()


class _Passes(NamedTuple):
    """Of a ``linear_logprob``."""

    forward: Callable[[LinearLogprobCall], LinearLogprobResults]
    backward: Callable[[LinearLogprobCall, LinearLogprobResults, RowGrads], LinearGrads]


def _two_passes(
    passes: _Passes, call: LinearPolicyLossCall, policy: PolicyPass, need_direction: bool
) -> LinearPolicyLossResults:
    own = LinearLogprobCall.of(
        call.hidden, call.weight, call.target_ids, call.head, return_entropy=policy.with_entropy,
        need_direction=need_direction, keep=any(call.needs) and not need_direction, needs=call.needs,
        algorithm="fused" if call.algorithm == "fused" else "tiled",
    )  # fmt: skip
    stats = passes.forward(own)
    loss, metrics, upstream = policy.whole(stats.logprobs, stats.entropy)
    grads = LinearGrads()
    if any(call.needs):
        kept = stats if call.policy.entropy_gradient else stats._replace(entropy=None)
        grads = passes.backward(own, kept, upstream)
    return LinearPolicyLossResults(loss, metrics, stats.logprobs, stats.entropy, *grads)


class _Run(NamedTuple):
    """Rows whose derivative goes into the GEMMs together, and where they lie."""

    at: int
    given: int
    live: Tensor | None  # those of them that have a derivative; None: all
    rows: int  # of these
    where: Tensor | slice  # in the hidden states as they were given
    states: Tensor | None  # as operands of d weight
    target_ids: Tensor
    temperature: float | Tensor
    grads: RowGrads
    results: LogprobResults


class _OnePass:
    def __init__(self, kernels: Any, call: LinearPolicyLossCall, plan: Plan) -> None:
        self.kernels, self.plan, self.policy = kernels, plan, plan.policy
        self.rows, self.scratch, n = plan.rows, plan.scratch, plan.n
        self.entropy_gradient = call.policy.entropy_gradient
        head, needs = call.head, call.needs
        self.bias_dtype = None if head.bias is None else head.bias.dtype
        self.head = linear_logprob.with_wide_bias(head)
        self.ids = select(call.target_ids, self.rows)
        self.t = select(head.temperature, self.rows)
        hidden, weight = self.scratch.source, self.scratch.weight
        new = functools.partial(hidden.new_empty, dtype=torch.float32)
        zeros = functools.partial(hidden.new_zeros, hidden.shape[0], dtype=torch.float32)
        self.state, with_entropy = new(len(State), n), plan.policy.with_entropy
        self.results = LogprobResults.empty(self.ids, with_entropy)
        # of all rows, also those that are left out; the loss of a step looks at later rows of its sequences
        self.apart = self.rows is not None or len(plan.steps) > 1
        self.logprobs = zeros() if self.apart else self.results.logprobs
        self.entropy = zeros() if self.apart and with_entropy else self.results.entropy

        self.dhidden = torch.zeros_like(hidden) if needs[0] else None
        # without a part of the workspace for a slice of it, it is summed in fp32 and narrowed by backward
        dtype = torch.float32 if self.scratch._dw is None else weight.dtype
        self.dweight = torch.empty(weight.shape, dtype=dtype, device=weight.device) if needs[1] else None
        with_bias = needs[2] and head.bias is not None
        self.dbias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if with_bias else None
        self.written = False  # whether dweight holds anything yet

    def run(self) -> LinearPolicyLossResults:
        whole = None
        with self.scratch:
            for number, step in enumerate(self.plan.steps):
                self._compute(step.compute)
                if len(self.plan.steps) == 1:
                    whole = self.policy.whole(self.logprobs, self.entropy)
                    first, (_, _, gradients) = 0, whole
                else:
                    edges = self.plan.edges[2 * number : 2 * number + 2]
                    first, gradients = self.policy.part(self.logprobs, self.entropy, *edges)
                self._finish(step, first, gradients)
        loss, metrics, _ = whole or self.policy.whole(self.logprobs, self.entropy)
        if self.dweight is not None and not self.written:
            self.dweight.zero_()
        dbias = None if self.dbias is None else self.dbias.to(self.bias_dtype)
        grads = self.dhidden, self.dweight, dbias
        return LinearPolicyLossResults(loss, metrics, self.logprobs, self.entropy, *grads)

    def _compute(self, blocks: range) -> None:
        """The logits of the blocks, which stay, and their statistics."""
        scratch, vocab = self.scratch, self.scratch.weight.shape[0]
        for block in blocks:
            scratch.load(self.rows, block)
        for v0, v1, w in scratch.weight_slices():
            for block in blocks:
                a, b = scratch.bounds(block)
                logits, t = scratch.block_logits(block, v0, w), rows_of(self.t, a, b)
                tile = linear_logprob.tile_of(logits, self.head, self.ids[a:b], t, v0, v1)
                results = LogprobResults._make(rows_of(x, a, b) for x in self.results)
                self.kernels.tile_forward(tile, self.state[:, a:b], v0 == 0, v1 == vocab, results)
        if self.apart and len(blocks):
            a, b = scratch.bounds(blocks[0])[0], scratch.bounds(blocks[-1])[1]
            where = slice(a, b) if self.rows is None else self.rows[a:b]
            self.logprobs[where] = self.results.logprobs[a:b]
            if self.entropy is not None and self.results.entropy is not None:
                self.entropy[where] = self.results.entropy[a:b]

    def _finish(self, step: Step, first: int, gradients: RowGrads) -> None:
        """From the gradients of the logprobs of some blocks to those of hidden, weight and bias."""
        scratch, head = self.scratch, self.head
        runs = [
            run for a, b, at in scratch.runs(step.finish) if (run := self._run(a, b, at, first, gradients))
        ]
        if not runs:
            return
        for v0, v1, w in scratch.weight_slices():
            dw_slice = None if self.dweight is None else self.dweight[v0:v1]
            dw = None if dw_slice is None else scratch.weight_gradient(dw_slice)
            for i, run in enumerate(runs):
                logits = scratch.tile(run.at, run.given, v0)
                logits = logits if run.live is None else scratch.compact(logits, run.live)
                dz = scratch.gradient(logits)
                tile = linear_logprob.tile_of(logits, head, run.target_ids, run.temperature, v0, v1)
                self.kernels.tile_backward(tile, run.grads, run.results, dz)
                if self.dhidden is not None:
                    scratch.accumulate(scratch.hidden_sum(run.at, run.rows), dz, w, v0 == 0)
                if dw is not None and run.states is not None:
                    scratch.accumulate(dw, dz.T, run.states, not self.written and i == 0)
                if self.dbias is not None:
                    self.dbias[v0:v1] += dz.sum(0, dtype=torch.float32)
            if dw is not None and dw_slice is not None and dw is not dw_slice:
                dw_slice.copy_(dw)
        self.written = True
        if self.dhidden is not None:
            for run in runs:
                self.dhidden[run.where] = scratch.hidden_sum(run.at, run.rows).to(self.dhidden.dtype)

    def _run(self, a: int, b: int, at: int, first: int, gradients: RowGrads) -> _Run | None:
        """The rows [a, b) as operands; on a CPU without those whose derivative is exactly 0, None if all
        are."""
        scratch: Resident = self.scratch
        where = slice(a, b) if self.rows is None else self.rows[a:b]
        grads = RowGrads._make(None if g is None else _rows_of(g, where, first) for g in gradients)
        entropy, row_max, log_sum = self.results.entropy, self.results.row_max, self.results.log_sum
        read = (self.ids, self.t, entropy if self.entropy_gradient else None, row_max, log_sum)
        ids, t, *stats = (rows_of(x, a, b) for x in read)
        states: Tensor | None = scratch.states(a, b, at)
        live, rows = None, b - a
        if scratch.leaves_out:
            nonzero = functools.reduce(torch.logical_or, [g != 0 for g in grads if g is not None])
            live = nonzero.nonzero()[:, 0]
            rows = live.numel()
            if rows == 0:
                return None
            if rows == b - a:
                live = None
            else:
                ids, t, *stats = (select(x, live) for x in (ids, t, *stats))
                grads = RowGrads._make(select(g, live) for g in grads)
                states = scratch.compact_states(states, at, live)
                where = live + where.start if isinstance(where, slice) else where[live]
        results = LogprobResults.for_backward(*stats)
        return _Run(at, b - a, live, rows, where, states, ids, t, grads, results)


def _rows_of(gradient: Tensor, where: Tensor | slice, first: int) -> Tensor:
    if isinstance(where, slice):
        return gradient[where.start - first : where.stop - first]
    return gradient[where - first]
