"""The workspace of the tiles and the library GEMMs into it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.drivers.linear_kept import KeptLogits, Layout, kept_plans, kept_tiles
from rlkernel.drivers.linear_tiles import Tile, operand_dtype, product_kind, tile_plan
from rlkernel.runtime import gpu, invariance, workspace
from rlkernel.runtime.workspace import Carver


class Scratch:
    """The parts of the workspace for ``n`` rows of ``hidden`` (gathered by index or all), and the GEMMs.

    With ``keep``, as many tiles of logits as the limit leaves room for stay where they are, and the backward
    pass that names their ``owner`` need not multiply them again; other leases in between are free to take the
    memory, and then it does.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, head: Head, n: int, gathered: bool, *, gradients: bool,
        hidden_gradient: bool = False, weight_gradient: bool = False, direction: bool = False,
        keep: bool = False, owner: Tensor | None = None, plan: Tile | None = None, mask: Tensor | None = None,
        whole_rows: bool = False, beside: int = 0,
    ) -> None:  # fmt: skip
        """``direction``: rows of the hidden states' size are summed in forward.  ``mask`` [n]: operands of
        the other rows are 0, whatever the hidden states hold there.  ``whole_rows``: the logits of a chunk
        have the whole vocabulary, in memory of the caller's (``place``), and its slices are columns of them.
        ``beside``: bytes of the limit that are another's."""
        self.source, self.weight, self.head, self.n, self.gathered = hidden, weight, head, n, gathered
        self._gradients, self._of_hidden, self._of_weight = gradients, hidden_gradient, weight_gradient
        self._direction, self._whole_rows, self._beside = direction, whole_rows, beside
        self.plan = plan or tile_plan(weight, head, n)
        self._mask, self._may_be_masked = mask, False
        self._held: int | None = None  # the first row of the chunk whose operands are there
        self.product = product_kind(head.compute_dtype, hidden.device)
        self.operand = operand_dtype(head.compute_dtype, hidden.device)
        self._owner = owner
        self._summed = 0  # rows of hidden states whose sums are there at a time
        self._slots, self._known = 0, False  # tiles that are kept, and whether they hold their logits already
        self._layout = Layout(n, weight.shape[0], *self.plan)  # of the tiles that are kept
        self.size = self._carve(Carver())
        self.backward_of_kept: Tile | None = None  # the tiles in which backward takes logits that are kept
        if keep and n:
            self._plan_kept()

    def _plan_kept(self) -> None:
        """How many tiles stay until backward, and in which tiles it takes them."""
        layout, device, itemsize = self._layout, self.source.device, self.head.logits_dtype.itemsize
        tile, whole = (layout.size(count) * itemsize for count in (1, layout.tiles))
        for plan in kept_plans(self.plan, self.n, device) if layout.is_joined else [self.plan]:
            used = max(self.size, self._size_of_backward(plan))
            self._slots = kept_tiles(layout.tiles, tile, whole, used, device)
            if self._slots or device.type == "cpu":
                self.size = used + layout.size(self._slots) * itemsize
            if self._slots:
                self.backward_of_kept = plan
                return

    def _size_of_backward(self, plan: Tile) -> int:
        own = self._gradients, self._of_hidden, self._of_weight, self.plan
        self._gradients = self._of_hidden = self._of_weight = True
        self._may_be_masked = gpu.runs_ahead(self.source.device)
        self.plan = plan
        size = self._carve(Carver())
        self._gradients, self._of_hidden, self._of_weight, self.plan = own
        self._may_be_masked = False
        return size

    def _carve(self, carver: Carver) -> int:
        n, dtype, weight_dtype, part = self.n, self.head.logits_dtype, self.weight.dtype, carver.part
        vocab, size = self.weight.shape
        tokens, wide = min(n, self.plan.tokens), min(self.plan.vocab, vocab)
        several = n > self.plan.tokens or weight_dtype != self.operand  # or the GEMM itself accumulates
        self._kept = part(self._layout.size(self._slots), dtype=dtype) if self._slots else None
        kept = carver.size
        self._logits = None if self._whole_rows else part(tokens, wide, dtype=dtype)
        self._carve_operands(carver, tokens, wide)
        accumulate = self._of_weight and several and weight_dtype != torch.float32
        self._dw = part(wide, size, dtype=torch.float32) if accumulate else None
        self._dh = None
        if self._sums_hidden:
            if carver.buffer is None:
                self._summed = self._rows_of_sums(tokens, carver.size - kept)
            self._dh = part(self._summed, size, dtype=torch.float32)
        return carver.size

    @property
    def _sums_hidden(self) -> bool:
        """Whether rows of the hidden states' gradient, or of its direction, are summed beside what becomes of
        them, as several products make a row and it is not fp32, or lies elsewhere."""
        wide = self.source.dtype == torch.float32
        if self._direction:
            return self.gathered or not wide
        return self._of_hidden and (self.gathered or (self._is_cut and not wide))

    @property
    def _is_cut(self) -> bool:
        """Whether there is more than one slice of the vocabulary."""
        return self.plan.vocab < self.weight.shape[0]

    def _rows_of_sums(self, tokens: int, used: int) -> int:
        """Of how many rows the sums are there at a time: of all, or of as many chunks as the limit holds."""
        if self._whole_rows or not (self._is_cut or self._direction):
            return tokens  # each chunk's are complete at once
        room = (workspace.limit(self.source.device) - self._beside - used) // (4 * self.source.shape[1])
        return min(self.n, max(room - room % self.plan.tokens, tokens))

    def _carve_operands(self, carver: Carver, rows: int, wide: int) -> None:
        hidden, weight, head = self.source, self.weight, self.head
        size, operand, part = hidden.shape[1], self.operand, carver.part
        rounded = operand != head.compute_dtype  # values of compute_dtype in fp32: autocast of fp32
        staged = self.product != "out_dtype"  # the product lands apart before it is rounded to logits_dtype
        apart = head.logits_dtype != operand and (self._gradients or staged)
        self._dz = part(rows, wide, dtype=operand) if apart else None  # None: over the logits
        convert = weight.dtype != operand or rounded or weight.stride(-1) != 1
        self._w = part(wide, size, dtype=operand) if convert else None
        convert = hidden.dtype != operand or rounded or self.gathered or hidden.stride(-1) != 1
        convert = convert or self._mask is not None or self._may_be_masked
        self._h = part(rows, size, dtype=operand) if convert else None

    def __enter__(self) -> "Scratch":
        self._lease = workspace.lease(self.size, self.source.device, self._owner)
        lease = self._lease.__enter__()
        if lease.kept:
            self._known = (
                lease.note.layout.rows == self.n
            )  # the backward pass leaves out rows without a gradient
            self._slots = lease.note.slots if self._known else 0
            self._layout = lease.note.layout
        self.place(lease.memory)
        return self

    def place(self, memory: Tensor, rows: Tensor | None = None, known: bool = False) -> None:
        """Take the parts of ``memory``, uint8 of at least ``size``, until ``let_go``.

        ``rows`` [tokens, V] are for the logits of a chunk, which they hold already if ``known``.
        """
        self._without_memory = dict(vars(self))
        self._carve(Carver(memory))
        if rows is not None:
            self._logits, self._known = rows, known

    def let_go(self) -> None:
        vars(self).update(self._without_memory)

    def keep(self, owner: Tensor) -> None:
        """Leave the kept tiles to the backward pass that names ``owner``."""
        if self.backward_of_kept is not None:
            size = self._layout.size(self._slots) * self.head.logits_dtype.itemsize
            note = KeptLogits(self._slots, self._layout, self.backward_of_kept)
            workspace.keep(self.source.device, owner, size, note)

    def __exit__(self, *exception: Any) -> None:
        self.let_go()  # no part outlives the lease
        self._lease.__exit__(*exception)

    def weight_slices(self) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, rows of the weight as operands of a GEMM), in vocabulary order."""
        if self.n == 0:
            return
        for v0 in range(0, self.weight.shape[0], self.plan.vocab):
            v1 = min(v0 + self.plan.vocab, self.weight.shape[0])
            yield v0, v1, self.weight_slice(v0, v1)

    def weight_slice(self, v0: int, v1: int) -> Tensor:
        w = rows_of(self.weight, v0, v1)
        return w if self._w is None else self._w[: v1 - v0].copy_(w.to(self.head.compute_dtype))

    def rows_at(self, index: Tensor) -> Tensor:
        """These rows of the weight in fp32, with the values that they have as operands."""
        return self.weight[index].to(self.head.compute_dtype).float()

    def rounds(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of the rows of hidden states whose sums are there at a time, whole chunks of them.

        Where that is not all, each round wants the logits of its rows again.
        """
        at_once = self._dh is None or not (self._is_cut or self._direction)
        step = max(self.n if at_once else self._summed, 1)
        for begin in range(0, self.n, step):
            yield begin, min(begin + step, self.n)
            # gradients went over the logits that forward had kept
            self._known = self._known and self._dz is not None

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """(begin, end) of each chunk of tokens, of all or of those of a round."""
        end = self.n if end is None else end
        return ((a, min(a + self.plan.tokens, end)) for a in range(begin, end, self.plan.tokens))

    def hidden(self, rows: Tensor | None, a: int, b: int) -> Tensor:
        """The hidden states of a chunk as operands of a GEMM."""
        if self._h is None:
            return rows_of(self.source, a, b)
        if self._held != a:
            self._gather(rows, a, b, self._h[: b - a])
            self._held = a
        return self._h[: b - a]

    def _gather(self, rows: Tensor | None, a: int, b: int, out: Tensor) -> None:
        if rows is not None and self.source.dtype == self.operand == self.head.compute_dtype:
            torch.index_select(self.source, 0, rows[a:b], out=out)
        else:
            h = self.source[a:b] if rows is None else self.source[rows[a:b]]
            out.copy_(h.to(self.head.compute_dtype))
        if self._mask is not None:  # 0 times what is not a number would be none
            out.masked_fill_(~self._mask[a:b, None], 0)

    def logits(self, h: Tensor, w: Tensor, v0: int, a: int) -> Tensor:
        """``h @ w.T`` in the tile of the vocabulary from ``v0`` on and the tokens from ``a`` on."""
        rows, wide = h.shape[0], w.shape[0]
        if self._kept is not None:
            index, start = self._layout.at(v0, a)
            if index < self._slots:
                tile = self._kept[start : start + rows * wide].view(rows, wide)
                return tile if self._known else self._product(tile, h, w)
        assert self._logits is not None
        if self._whole_rows:
            tile = rows_of(self._logits, 0, rows)[:, v0 : v0 + wide]
            return tile if self._known else self._product(tile, h, w)
        return self._product(dense(self._logits, rows, wide), h, w)

    def _product(self, tile: Tensor, h: Tensor, w: Tensor) -> Tensor:
        if self.product == "out_dtype" and tile.dtype == torch.float32:
            return torch.ops.aten.mm.dtype_out(h, w.T, torch.float32, out=tile)
        if tile.dtype == self.operand:
            return torch.mm(h, w.T, out=tile)
        if tile.dtype == self.head.compute_dtype and invariance.is_on():
            # the model's own product, whose order may be another than that of fp32 operands
            return torch.mm(h.to(tile.dtype), w.to(tile.dtype).T, out=tile)
        return tile.copy_(torch.mm(h, w.T, out=self.gradient(tile)))

    def gradient(self, logits: Tensor) -> Tensor:
        """Where the gradient of this tile of logits goes: over it, where the dtypes allow."""
        return logits if self._dz is None else dense(self._dz, *logits.shape)

    def round_sums(self, out: Tensor, a: int, b: int, begin: int) -> Tensor:
        """Where the rows [a, b) of the hidden states' gradient are summed in the round from ``begin`` on: in
        fp32 beside ``out`` [N, H], or there."""
        if self._dh is None:
            return rows_of(out, a, b)
        if not (self._is_cut or self._direction):
            begin = a
        return rows_of(self._dh, a - begin, b - begin)

    def store_round(self, out: Tensor, rows: Tensor | None, a: int, b: int, sums: Tensor) -> None:
        """The sums of the rows [a, b) of a chunk, to where they belong."""
        if self._dh is None:
            return
        if rows is None:
            rows_of(out, a, b).copy_(sums)
        else:
            out.index_copy_(0, rows_of(rows, a, b), sums.to(out.dtype))

    def weight_gradient(self, out: Tensor) -> Tensor:
        """The accumulator for a slice of the weight's gradient: an fp32 part, or the slice itself."""
        return out if self._dw is None else rows_of(self._dw, 0, out.shape[0])

    def accumulate(self, out: Tensor, a: Tensor, b: Tensor, first: bool) -> Tensor:
        """``out = a @ b`` or ``out += a @ b``; products of low precision are summed in fp32."""
        if self.product == "out_dtype" and out.dtype == torch.float32:
            if first:
                return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
            return torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
        if out.dtype != a.dtype:  # a single product whose result is narrower than its operands
            assert first
            return out.copy_(torch.mm(a, b))
        return torch.mm(a, b, out=out) if first else out.addmm_(a, b)


def rows_of(x: Any, begin: int, end: int) -> Any:
    """``x[begin:end]`` of a tensor, which takes a microsecond also where it is all of it; others have no
    rows."""
    if not isinstance(x, Tensor) or (begin == 0 and end == x.shape[0]):
        return x
    return x[begin:end]


def select(x: Any, rows: Tensor | None) -> Any:
    """These rows of a tensor; None: all."""
    return x[rows] if isinstance(x, Tensor) and rows is not None else x


def scatter(x: Any, rows: Tensor | None, n: int) -> Any:
    """The n rows of which ``select`` took ``x``, 0 in the others."""
    if x is None or rows is None:
        return x
    return x.new_zeros(n, *x.shape[1:]).index_copy_(0, rows, x)


def dense(part: Tensor, rows: int, columns: int) -> Tensor:
    if part.shape == (rows, columns):
        return part
    # a slice of a part has gaps between its rows unless it takes all columns: take the memory anew
    return part.as_strided((rows, columns), (columns, 1))
