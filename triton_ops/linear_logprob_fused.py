"""``linear_logprob(algorithm="fused")``: no tile of logits is ever in memory, and no bit follows the batch.

| pass | kernels | operations |
|---|---|---|
| forward | product and softmax of tiles of the vocabulary, merged in their order | ``2 N H V`` |
| backward | gradient of the logits of a slice, in the operands' dtype, from the same product | ``2 N H V`` |
| | its products with the weight and with the hidden states | ``2 N H V`` each |

Rows that are ignored, and in backward those whose upstream gradient is 0, are sorted behind the others on the
device, and blocks of them are skipped: nothing synchronises.  Tiles of the vocabulary follow from V alone; a
sum over the vocabulary or over the rows that is cut by the workspace is continued where it stopped.  So
neither other rows nor the workspace's limit change a bit of the outputs, of ``hidden``'s gradient, or, for
the same rows, of the weight's.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head, LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import LogprobResults, RowGrads
from rlkernel.drivers.linear_logprob import with_wide_bias
from rlkernel.drivers.linear_rows import Rows
from rlkernel.runtime import workspace
from rlkernel.runtime.workspace import Carver
from rlkernel.triton_ops import linear_logprob_kernels as kernels
from rlkernel.triton_ops._device import processors
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops._tiles import (
    COPIED,
    LARGE,
    NARROW,
    SMALL,
    Launch,
    launch_of,
    leased,
    or_none,
    run,
    tl_type,
)
from rlkernel.triton_ops.logprob import per_row

MERGED, MERGED_ROWS = 16, 32  # tiles and rows whose sums are merged at a time
TABLED_ROWS = 64
# A slice of the vocabulary is as wide as a multiple of 66 blocks of 256, which with 4 blocks of rows fill 132
# multiprocessors twice; a narrower one of one block.
WIDTHS = (16896, 256)
LEAST_WIDTH = 2048  # below it rows are cut before the slice gets narrower still


# On Blackwell a thread has a row: what it sums needs no other warps, and the place of none.
TALL = LARGE._replace(rows=256, columns=128)
# By generation: forward, gradient of the logits, products into 16 bits, products into or from fp32. Those of
# Hopper were the fastest of ten on an H200: of the second, whose epilogue is long, two blocks share a
# multiprocessor; the last would spill as LARGE, which takes 4% less time.
DESCRIBED = {
    9: (LARGE, SMALL._replace(warps=4), LARGE, TALL),
    10: (TALL, COPIED, COPIED, SMALL),
}
# what a bias and a softcap want of registers, where they are asked for
WITH_BIAS = (SMALL._replace(stages=4), NARROW._replace(stages=4))
WITH_SOFTCAP = {
    9: WITH_BIAS,
    10: (SMALL._replace(stages=4),) * 2,
}


def forward(call: LinearLogprobCall) -> LinearLogprobResults:
    rows = Rows.of(call.target_ids != call.ignore_index)
    outputs, statistics = _forward(call, rows)
    others = {name: rows.put_back(x) for name, x in statistics.items()}
    results = LinearLogprobResults.of(LogprobResults._make(map(rows.put_back, outputs)), **others)
    if call.need_direction:  # the backward pass of ones
        ones = RowGrads(torch.ones_like(results.logprobs))
        direction = backward(call._replace(needs=(True, False, False)), results, ones).hidden
        results = results._replace(direction=direction)
    return results


def _forward(call: LinearLogprobCall, rows: Rows) -> tuple[LogprobResults, dict[str, Tensor | None]]:
    hidden, weight, head = call.hidden, call.weight, with_wide_bias(call.head)
    (n, size), vocab = hidden.shape, weight.shape[0]
    ids, temperatures = rows.take(call.target_ids), rows.take(head.temperature)
    outputs = LogprobResults.empty(ids, call.return_entropy)
    statistics = _empty_statistics(call, n)
    # by rows that are dense, however the given ones lie
    launch = _launch(0, hidden.new_empty(1, size, dtype=head.compute_dtype), weight, head)
    parts = cdiv(vocab, launch.tile.columns)
    row_bytes = 4 * len(kernels.Extra) * parts + size * head.compute_dtype.itemsize
    chunk = max(workspace.limit(hidden.device) // (row_bytes * LARGE.rows), 1) * LARGE.rows
    carve = functools.partial(_carve_forward, min(chunk, n), size, parts, head)
    with leased(carve, hidden.device) as (states, part):
        for a in range(0, n, chunk):
            b = min(a + chunk, n)
            count, h = rows.number_from(a), _gather(hidden, rows.order[a:b], states, head)
            t, t_all = per_row(temperatures)
            t = None if t is None else t[a:b]
            run(
                kernels.product_kernel, min(launch.blocks(b - a, vocab), processors(hidden.device)), hidden,
                h, h.stride(0), weight, weight.stride(0), b - a, vocab, size, count, ids[a:b],
                t, t_all, head.bias, or_none(head.logit_scale), head.softcap, part,
                ENTROPY=call.return_entropy, SQUARES="log_sum_sq_probs" in statistics,
                TOTAL="mean_logits" in statistics, COMPUTE=tl_type(head.compute_dtype),
                LOGITS=tl_type(head.logits_dtype), **launch.options,
            )  # fmt: skip
            named = (statistics.get(name) for name in ("mean_logits", "is_top1", "log_sum_sq_probs"))
            run(
                kernels.merge_kernel, cdiv(b - a, MERGED_ROWS), hidden,
                part, b - a, vocab, parts, count, ids[a:b], t, t_all,
                *(None if x is None else x[a:b] for x in (*outputs.statistics, *named)),
                BN=launch.tile.columns, PARTS=MERGED, ROWS=MERGED_ROWS, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return outputs, statistics


def backward(call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads) -> LinearGrads:
    upstream = [g for g in grads if g is not None]
    nonzero = functools.reduce(torch.logical_or, [g != 0 for g in upstream])
    if results.direction is not None and grads.logprobs is not None and len(upstream) == 1:
        row = grads.logprobs[:, None]
        return LinearGrads(torch.where(row == 0, 0, row * results.direction).to(call.hidden.dtype))
    return _Backward(call, results, grads, Rows.of((call.target_ids != call.ignore_index) & nonzero)).run()


class _Cut(NamedTuple):
    """Rows and vocabulary entries whose gradient is in memory at a time."""

    rows: int
    width: int


class _Backward:
    def __init__(
        self, call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads, rows: Rows
    ) -> None:
        self.hidden, self.weight, self.rows = call.hidden, call.weight, rows
        self.head, self.bias_dtype = with_wide_bias(call.head), None if call.bias is None else call.bias.dtype
        self.need_hidden, self.need_weight = call.needs[:2]
        self.need_bias = call.needs[2] and call.bias is not None
        self.compute = self.head.compute_dtype
        self.ids, self.temperatures = rows.take(call.target_ids), rows.take(self.head.temperature)
        self.grads = RowGrads._make(map(rows.take, grads))
        self.results = LogprobResults(
            *map(rows.take, (results.logprobs, results.entropy, None, results.row_max, results.log_sum))
        )
        (self.n, self.size), self.vocab = self.hidden.shape, self.weight.shape[0]
        convert = self.weight.dtype != self.compute or self.weight.stride(1) != 1
        limit = workspace.limit(self.weight.device)
        self.cut = _cut(self.n, self.vocab, self.size, self.compute, convert, self.weight.dtype, limit)
        self.convert = convert
        self.several_slices, self.several_chunks = self.cut.width < self.vocab, self.cut.rows < self.n
        self.stride = -(-self.cut.width // 8) * 8  # rows of the gradient begin at multiples of 16 bytes
        self.sum_weight = self.need_weight and self.several_chunks and self.weight.dtype != torch.float32
        self.summed = 0
        if self.need_hidden and self.several_slices:
            self.summed = self._rows_of_sums(limit)

    def _rows_of_sums(self, limit: int) -> int:
        """Of how many rows fp32 sums of the hidden gradient are there at a time: whole chunks of them."""
        used = Carver()
        self._carve(used)
        room = (limit - used.size) // (4 * self.size)
        return min(self.n, max(room - room % self.cut.rows, self.cut.rows))

    def run(self) -> LinearGrads:
        hidden, weight = self.hidden, self.weight
        dhidden = hidden.new_zeros(hidden.shape) if self.need_hidden else None
        dweight = weight.new_empty(weight.shape) if self.need_weight else None
        dbias = weight.new_zeros(self.vocab, dtype=torch.float32) if self.need_bias else None
        if self.n == 0 and dweight is not None:
            dweight.zero_()
        with leased(self._carve, hidden.device) as parts:
            self.states, self.table, self.dz, self.converted, self.weight_sums, self.hidden_sums = parts
            if self.n:
                self._tabulate()
            step = self.summed or max(self.n, 1)
            for begin in range(0, self.n, step):
                end = min(begin + step, self.n)
                # after one round the weight's and the bias's are complete
                into_weight, into_bias = (dweight, dbias) if begin == 0 else (None, None)
                last_row = end if into_weight is None and into_bias is None else self.n
                for v0 in range(0, self.vocab, self.cut.width):
                    v1 = min(v0 + self.cut.width, self.vocab)
                    w = weight[v0:v1]
                    if self.convert:
                        w = self.converted[: v1 - v0].copy_(w)
                    for a in range(begin, last_row, self.cut.rows):
                        b = min(a + self.cut.rows, self.n)
                        h = _gather(hidden, self.rows.order[a:b], self.states, self.head)
                        dz = self._logits_gradient(h, w, v0, v1, a, b)
                        if dhidden is not None and a < end:
                            self._into_hidden(dhidden, dz, w, a, begin, first=v0 == 0, last=v1 == self.vocab)
                        if into_weight is not None:
                            self._into_weight(into_weight[v0:v1], dz, h, a, b)
                        if into_bias is not None:
                            into_bias[v0:v1] += dz.sum(0, dtype=torch.float32)
        return LinearGrads(dhidden, dweight, None if dbias is None else dbias.to(self.bias_dtype))

    def _carve(self, carver: Carver) -> tuple[Tensor, ...]:
        rows, width = min(self.cut.rows, self.n), self.cut.width
        return (
            carver.part(rows, self.size, dtype=self.compute),
            carver.part(len(kernels.Row), self.n, dtype=torch.float32),
            carver.part(rows, self.stride, dtype=self.compute),
            carver.part(width if self.convert else 0, self.size, dtype=self.compute),
            carver.part(width if self.sum_weight else 0, self.size, dtype=torch.float32),
            carver.part(self.summed, self.size, dtype=torch.float32),
        )

    def _tabulate(self) -> None:
        t, t_all = per_row(self.temperatures)
        found = self.results
        run(
            kernels.row_gradient_kernel, cdiv(self.n, TABLED_ROWS), self.hidden,
            self.n, self.rows.number, t, t_all, or_none(self.head.logit_scale),
            self.grads.logprobs, self.grads.entropy, self.grads.lse,
            found.logprobs, None if self.grads.entropy is None else found.entropy, found.log_sum, self.table,
            ROWS=TABLED_ROWS, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip

    def _logits_gradient(self, h: Tensor, w: Tensor, v0: int, v1: int, a: int, b: int) -> Tensor:
        head, dz = self.head, self.dz[: b - a, : v1 - v0]
        launch = _launch(1, h, w, head)
        bias = None if head.bias is None else head.bias[v0:v1]
        run(
            kernels.logits_gradient_kernel, launch.blocks(b - a, v1 - v0), self.hidden,
            h, h.stride(0), w, w.stride(0), b - a, v1 - v0, self.size, self.rows.number_from(a), v0,
            self.ids[a:b], bias, or_none(head.logit_scale), head.softcap,
            self.table[:, a:b], self.n, self.results.row_max[a:b], dz, dz.stride(0),
            SPREAD=self.grads.entropy is not None, TARGET=self.grads.logprobs is not None,
            COMPUTE=tl_type(self.compute), LOGITS=tl_type(head.logits_dtype), **launch.options,
        )  # fmt: skip
        return dz

    def _into_hidden(
        self, out: Tensor, dz: Tensor, w: Tensor, a: int, begin: int, *, first: bool, last: bool
    ) -> None:
        """In fp32 until the last slice of the vocabulary, whose rows go where they belong."""
        b = a + len(dz)
        sums = self.hidden_sums[a - begin : b - begin]
        before = None if first else sums
        into, where = (out, self.rows.order[a:b]) if last else (sums, None)
        self._product(dz, w, before, into, where, self.rows.number_from(a), of_weight=False)

    def _into_weight(self, out: Tensor, dz: Tensor, h: Tensor, a: int, b: int) -> None:
        sums = out if self.weight.dtype == torch.float32 else self.weight_sums[: len(out)]
        into = out if b == self.n else sums
        before = None if a == 0 else sums
        self._product(dz, h, before, into, None, self.rows.number_from(a), of_weight=True)

    def _product(
        self, a: Tensor, b: Tensor, sums: Tensor | None, out: Tensor, where: Tensor | None, count: Tensor,
        *, of_weight: bool,
    ) -> None:  # fmt: skip
        inner, rows = a.shape if of_weight else (a.shape[1], a.shape[0])
        wide = sums is not None or out.dtype == torch.float32
        launch = _launch(3 if wide else 2, a, b, self.head, across=of_weight)
        run(
            kernels.gradient_product_kernel, launch.blocks(rows, self.size), self.hidden,
            a, a.stride(0), b, b.stride(0), rows, inner, self.size, count, sums, out, where,
            OF_WEIGHT=of_weight, COMPUTE=tl_type(self.compute), **launch.options,
        )  # fmt: skip


def _cut(
    n: int, vocab: int, size: int, compute: torch.dtype, convert: bool, weight_dtype: torch.dtype, limit: int
) -> _Cut:
    """As many rows as leave room for a slice that is wide enough, and the widest slice beside them."""
    rows = max(n, 1)
    while True:
        entry = rows * compute.itemsize + (size * compute.itemsize if convert else 0)
        if rows < n and weight_dtype != torch.float32:
            entry += 4 * size
        fixed = rows * size * compute.itemsize + 4 * len(kernels.Row) * n
        if (limit - fixed) // entry >= vocab:
            return _Cut(rows, vocab)
        width = (limit - fixed - 4 * rows * size) // entry  # slices, and sums over them
        if width >= min(vocab, LEAST_WIDTH) or rows <= LARGE.rows:
            break
        rows = -(-rows // (2 * LARGE.rows)) * LARGE.rows
    unit = next((unit for unit in WIDTHS if width >= unit), WIDTHS[-1])
    return _Cut(rows, min(vocab, max(width // unit, 1) * unit))


def _launch(kind: int, a: Tensor, b: Tensor, head: Head, *, across: bool = False) -> Launch:
    """How to multiply: 0 and 1, logits and their gradient; 2 and 3, gradients in 16 and in 32 bits."""
    tiles = {found: described[kind] for found, described in DESCRIBED.items()}
    if kind < 2 and head.bias is not None:
        tiles = dict.fromkeys(DESCRIBED, WITH_BIAS[kind])
    elif kind < 2 and head.softcap is not None:
        tiles = {found: described[kind] for found, described in WITH_SOFTCAP.items()}
    # the gradient of the logits wants registers, of which AMD has more
    loaded = NARROW if kind == 1 and torch.version.hip is None else SMALL
    return launch_of(a, b, head.compute_dtype, tiles, loaded, across=across)


def _gather(hidden: Tensor, order: Tensor, states: Tensor, head: Head) -> Tensor:
    """Rows of the hidden states as operands."""
    out = states[: len(order)]
    if hidden.dtype == head.compute_dtype:
        return torch.index_select(hidden, 0, order, out=out)
    return out.copy_(hidden[order])


def _carve_forward(rows: int, size: int, parts: int, head: Head, carver: Carver) -> tuple[Tensor, Tensor]:
    states = carver.part(rows, size, dtype=head.compute_dtype)
    return states, carver.part(len(kernels.Extra) * parts * rows, dtype=torch.float32)


def _empty_statistics(call: LinearLogprobCall, n: int) -> dict[str, Tensor | None]:
    new = functools.partial(torch.empty, n, device=call.hidden.device)
    return {name: new(dtype=torch.bool if name == "is_top1" else torch.float32) for name in call.statistics}
