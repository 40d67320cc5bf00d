"""``linear_logprob`` in tiles: a library GEMM into the workspace, then one fused kernel over it.

Shared by the backends that have the tile kernels (``tile_forward``, ``tile_backward``, ``tile_exp``: see
``rlkernel.native.logprob``).  Loops run over the vocabulary outside and over the tokens inside, so that a
slice of the weight is converted once and its gradient accumulates in fp32 without a second buffer of the
weight's size.

FLOPs: 2 N H V a GEMM; forward 1 GEMM, backward 3 (logits again, as far as the workspace could not keep them;
hidden; weight), with a frozen head 2 in all.
Bytes beside the GEMMs: the forward kernel reads each tile once, the backward kernel reads and writes it once.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head, LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import LogprobResults, RowGrads, State, Tile
from rlkernel.drivers.linear_chosen import Chosen, choose, choose_again, operations
from rlkernel.drivers.linear_gradients import head_gradients
from rlkernel.drivers.linear_kept import KeptLogits
from rlkernel.drivers.linear_logprob_fp8 import Fp8Scratch, Multiply
from rlkernel.drivers.linear_logprob_statistics import TileStatistics
from rlkernel.drivers.linear_products import Scratch, rows_of, scatter, select
from rlkernel.drivers.linear_tiles import backward_plan
from rlkernel.runtime import gpu, workspace


def forward(kernels: Any, call: LinearLogprobCall, multiply: Multiply | None = None) -> LinearLogprobResults:
    """The forward pass of every tiled backend.

    With ``keep`` the workspace holds on to logits for a backward pass that follows at once.
    ``multiply``: the backend's product of FP8 with FP8.
    """
    hidden, weight, target_ids = call.hidden, call.weight, call.target_ids
    head = with_wide_bias(call.head)
    kept = target_ids != head.ignore_index
    rows, mask = choose(kept, operations(weight, head, hidden.shape[0], 1))
    n = hidden.shape[0] if rows is None else rows.numel()
    ids, t = select(target_ids, rows), select(head.temperature, rows)
    state = hidden.new_empty(len(State), n, dtype=torch.float32)
    outputs = LogprobResults.empty(ids, call.return_entropy)
    direction = None
    if call.need_direction:
        direction = (hidden.new_empty if rows is None else hidden.new_zeros)(hidden.shape)
    also = TileStatistics(kernels, call, head, ids) if call.statistics else None
    # a graph may be replayed after others took the workspace
    keep = call.keep and not gpu.capturing(hidden.device)
    gathered, aims = rows is not None, call.need_direction
    made = _scratch(call, multiply)
    with made(hidden, weight, head, n, gathered, gradients=aims, direction=aims, keep=keep) as scratch:
        for begin, end in scratch.rounds():
            for v0, v1, w in scratch.weight_slices():
                first, last = v0 == 0, v1 == weight.shape[0]
                for a, b in scratch.chunks(begin, end):
                    h = scratch.hidden(rows, a, b)
                    logits = scratch.logits(h, w, v0, a)
                    tile = tile_of(logits, head, ids[a:b], rows_of(t, a, b), v0, v1)
                    states = state if b - a == n else state[:, a:b]
                    before = None if direction is None or first else states[State.maximum].clone()
                    results = LogprobResults(*(rows_of(x, a, b) for x in outputs))
                    kernels.tile_forward(tile, states, first, last, results)
                    if also is not None:
                        also.tile(tile, h, w, a, b)
                    if direction is None:
                        continue
                    exps = scratch.gradient(logits)
                    kernels.tile_exp(tile, states[State.maximum], exps)
                    sums = scratch.round_sums(direction, a, b, begin)
                    if before is not None:
                        _rescale(sums, before, states[State.maximum], tile.temperature)
                    scratch.accumulate(sums, exps, w, first)
            if direction is not None:
                of_round = LogprobResults(*(rows_of(x, begin, end) for x in outputs))
                sums = scratch.round_sums(direction, begin, end, begin)
                at_target = state[State.at_target][begin:end]
                _finish_direction(sums, ids[begin:end], rows_of(t, begin, end), at_target, of_round, scratch)
                if mask is not None:
                    sums.masked_fill_(~mask[begin:end, None], 0)
                for a, b in scratch.chunks(begin, end):
                    scratch.store_round(direction, rows, a, b, rows_of(sums, a - begin, b - begin))
        others = {} if also is None else also.finish(t, state, outputs.log_sum)
        others = {name: scatter(x, rows, hidden.shape[0]) for name, x in others.items()}
        outputs = LogprobResults(*(scatter(x, rows, hidden.shape[0]) for x in outputs))
        scratch.keep(outputs.log_sum)
    if direction is not None:
        others["direction"] = direction
    return LinearLogprobResults.of(outputs, **others)


def backward(
    kernels: Any, call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads,
    multiply: Multiply | None = None,
) -> LinearGrads:  # fmt: skip
    """The backward pass of every tiled backend."""
    hidden, weight, target_ids, head, needs = call.hidden, call.weight, call.target_ids, call.head, call.needs
    direction, log_sum = results.direction, results.log_sum
    need_hidden, need_weight = needs[:2]
    if direction is not None and grads.logprobs is not None and grads.entropy is None and grads.lse is None:
        row = grads.logprobs[:, None]
        return LinearGrads(torch.where(row == 0, 0, row * direction).to(hidden.dtype))

    bias_dtype, head = head.bias.dtype if head.bias is not None else None, with_wide_bias(head)
    nonzero = functools.reduce(torch.logical_or, [g != 0 for g in grads if g is not None])
    kept = target_ids != head.ignore_index
    (rows, mask), there = _rows_of_backward(call, kept, kept & nonzero, log_sum)
    n = hidden.shape[0] if rows is None else rows.numel()
    scratch = _scratch(call, multiply)(
        hidden, weight, head, n, rows is not None, gradients=True, hidden_gradient=need_hidden,
        weight_gradient=need_weight, owner=log_sum if there else None,
        plan=there.plan if there else backward_plan(weight, head, n), mask=mask if need_weight else None,
    )  # fmt: skip
    stats = [select(x, rows) for x in (results.entropy, results.row_max, log_sum)]
    ids, t = select(target_ids, rows), select(head.temperature, rows)
    if mask is not None:  # to the kernels those that do not count are ignored ones: they write zeros there
        ids = torch.where(mask, ids, head.ignore_index)
    upstream = [select(g, rows) for g in grads]

    def fill(logits: Tensor, v0: int, v1: int, a: int, b: int, dz: Tensor) -> None:
        tile = tile_of(logits, head, ids[a:b], rows_of(t, a, b), v0, v1)
        row_grads = RowGrads(*(rows_of(x, a, b) for x in upstream))
        row_stats = LogprobResults.for_backward(*(rows_of(x, a, b) for x in stats))
        kernels.tile_backward(tile, row_grads, row_stats, dz)

    with scratch:
        return head_gradients(scratch, rows, needs, bias_dtype, fill)


def _scratch(call: LinearLogprobCall, multiply: Multiply | None) -> Any:
    return Scratch if call.weight_scale is None else functools.partial(Fp8Scratch, call, multiply)


def _rows_of_backward(
    call: LinearLogprobCall, kept: Tensor, wanted: Tensor, log_sum: Tensor
) -> tuple[Chosen, KeptLogits | None]:
    """The rows to compute, and what the forward pass kept if its logits may be used."""
    weight, head, device = call.weight, call.head, wanted.device
    products = int(call.needs[0]) + int(call.needs[1])
    note = None if gpu.capturing(device) else workspace.kept_for(device, log_sum)
    if note is None:
        return choose(wanted, operations(weight, head, wanted.shape[0], products + 1)), None
    chosen, there = choose_again(wanted, kept, note.layout.rows, products, operations(weight, head, 1, 1))
    return chosen, note if there else None


def with_wide_bias(head: Head) -> Head:
    """With the bias as the kernels of tiles take it."""
    return head if head.bias is None else head._replace(bias=head.bias.float().contiguous())


def tile_of(logits: Tensor, head: Head, ids: Tensor, t: float | Tensor, v0: int, v1: int) -> Tile:
    """The entries [v0, v1) of the vocabulary, of the rows that ``ids`` and ``t`` are of."""
    return Tile(
        logits, v0, ids, t, head.ignore_index, rows_of(head.bias, v0, v1), head.logit_scale, head.softcap
    )


def _rescale(direction: Tensor, before: Tensor, after: Tensor, t: float | Tensor) -> None:
    same = before == after  # also where both are -inf, whose difference is NaN
    direction.mul_(torch.where(same, 1, ((before - after) / t).exp())[:, None])


def _finish_direction(
    direction: Tensor,
    ids: Tensor,
    t: float | Tensor,
    at_target: Tensor,
    results: LogprobResults,
    scratch: Scratch,
) -> None:
    """From ``sum over i != target of e_i f'_i W_i`` to ``(1 - p_t) f'_t W_t - sum of p_i f'_i W_i``.

    The target's term stands apart because 1 - p_t, taken as a difference, loses all digits as p_t -> 1.
    """
    vocab, head = scratch.weight.shape[0], scratch.head
    slope = head.logit_scale / t
    if head.softcap is not None:
        slope = slope * (1 - (at_target / head.softcap) ** 2)
    pull = -torch.expm1(results.logprobs) * slope
    direction.mul_(-torch.exp(-results.log_sum)[:, None])
    inside = torch.where((ids >= 0) & (ids < vocab), ids, 0)
    for a, b in scratch.chunks(0, len(direction)):
        direction[a:b].add_(scratch.rows_at(inside[a:b]).mul_(pull[a:b, None]))
