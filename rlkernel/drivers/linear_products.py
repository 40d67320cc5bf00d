"""The workspace of the tiles and the library GEMMs into it."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.drivers.linear_kept import Layout
from rlkernel.runtime import gpu, invariance, workspace
from rlkernel.runtime.workspace import ALIGNMENT, Carver


class Tile(NamedTuple):
    """How many tokens and vocabulary entries a tile holds: from V, H, dtypes and the limit; from N on a GPU
    where all rows are one chunk, or backward computes their logits anew."""

    tokens: int
    vocab: int


# The most that helps: GEMMs run at full speed, and on a CPU a tile of logits stays in the caches.
CPU_TILE = Tile(1024, 4096)
# On a GPU a slice of the vocabulary is 66 blocks of 256 wide, or a half or a quarter of it: with rows in
# multiples of 512 its blocks fill 132 multiprocessors whole.
GPU_TILE = Tile(4096, 16896)
GPU_ROWS = 512
# Rows of whole logits from which linear_policy_loss gains by one pass: a chunk of N saves 2 N H V operations
# and reads and writes the weight's gradient, 8 V H bytes. At F operations and B bytes in a second that pays
# from 4 F / B rows on: F / B is 150 to 300 in data sheets from A100 to B200 and MI300X, 10 to 30 on a CPU.
CPU_WHOLE_ROWS, GPU_WHOLE_ROWS = 128, 1024


class KeptLogits(NamedTuple):
    """What the workspace holds of a forward pass."""

    slots: int
    layout: Layout  # of the tiles of forward
    plan: Tile  # the tiles of the backward pass for which there is room beside them


class _Shape(NamedTuple):
    """All that a tile follows from, but for the limit."""

    vocab: int
    size: int
    dtype: torch.dtype
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    most: Tile

    @classmethod
    def of(cls, weight: Tensor, head: Head) -> "_Shape":
        device, (vocab, size) = weight.device, weight.shape
        most = CPU_TILE if device.type == "cpu" else GPU_TILE
        return cls(vocab, size, weight.dtype, head.logits_dtype, head.compute_dtype, device, most)

    @property
    def operand(self) -> torch.dtype:
        return operand_dtype(self.compute_dtype, self.device)

    @property
    def converted(self) -> int:
        """Bytes that an entry of the weight takes as an operand, where it is none as it is."""
        return 0 if self.dtype == self.operand == self.compute_dtype else self.operand.itemsize

    @property
    def cell(self) -> int:
        """Bytes of a logit, and of its gradient where that does not go over it."""
        apart = self.logits_dtype != self.operand
        return self.logits_dtype.itemsize + (self.operand.itemsize if apart else 0)

    @property
    def sums_apart(self) -> bool:
        """Whether the weight's gradient of one chunk is summed beside it, as the product cannot write it."""
        return self.dtype not in (self.operand, torch.float32)


def tile_plan(weight: Tensor, head: Head, n: int | None = None) -> Tile:
    """The tile: the same for forward and backward, or the recomputed logits would not be those of the lse.

    The widest slice of the vocabulary whose converted weight and fp32 gradient take at most half of the
    limit, and as many tokens as fit beside it.  On a GPU, ``n`` rows that are no more than those have wider
    slices; where the bits of a row must not follow their number, ``n`` is not looked at.
    """
    shape, limit = _Shape.of(weight, head), workspace.limit(weight.device)
    plan = _tile_plan(shape, limit)
    if n is None or weight.device.type == "cpu" or not 0 < n <= plan.tokens or invariance.is_on():
        return plan
    return _few_rows(shape, limit, n, plan)


@functools.lru_cache
def _tile_plan(shape: _Shape, limit: int) -> Tile:
    vocab, size, most, operand = shape.vocab, shape.size, shape.most, shape.operand
    logits = shape.logits_dtype.itemsize
    cell = shape.cell
    per_entry = size * (shape.converted + (0 if shape.dtype == torch.float32 else 4))
    per_token = size * (operand.itemsize + 4)
    wide = min(vocab, most.vocab)
    while wide > 256 and wide * per_entry > limit // 2:
        wide = _narrower(wide)
    tokens = max((limit - wide * per_entry) // (cell * wide + per_token), 16)
    # linear_policy_loss keeps whole rows of logits, in these same tiles: its bits are those of linear_logprob
    if shape.device.type == "cpu":  # whose GEMMs lose little by it
        row = logits * vocab + cell * wide + 4 * per_token
        whole = (limit - wide * size * shape.converted) // row
        tokens = min(tokens, max(whole, CPU_WHOLE_ROWS))
    else:
        fixed, row = _whole_rows(shape, wide)
        whole = (limit - fixed) // row
        if GPU_WHOLE_ROWS <= whole < min(tokens, most.tokens):
            tokens = whole - whole % GPU_ROWS
    if tokens > 128:
        tokens -= tokens % 128
    return Tile(int(min(tokens, most.tokens)), wide)


@functools.lru_cache
def _few_rows(shape: _Shape, limit: int, n: int, plan: Tile) -> Tile:
    """``plan`` with the fewest slices of the vocabulary that few rows leave room for.

    The host takes longer for a narrow one than the GPU, and each ends in a wave of blocks that is not full.
    What the limit holds in the slices of ``plan`` it holds in these: the logits of all rows until backward,
    or beside what linear_policy_loss needs.
    """

    def bytes_of(wide: int) -> tuple[int, int]:
        fixed, row = _whole_rows(shape, wide)
        kept = n * shape.vocab * shape.logits_dtype.itemsize
        return _all_rows(shape, n, wide) + kept, fixed + n * row

    of_hidden = n * shape.size * (shape.operand.itemsize + 4)  # which not every call has
    held = [size - of_hidden <= limit for size in bytes_of(plan.vocab)]
    for wide in _widths(shape, plan.vocab):
        still = all(size <= limit or not before for size, before in zip(bytes_of(wide), held, strict=True))
        if still and _all_rows(shape, n, wide) <= limit:
            return plan._replace(vocab=wide)
    return plan


def _widths(shape: _Shape, least: int) -> Iterator[int]:
    """Widths of slices, of the fewest slices first, down to ``least``: whole multiples of a GPU's slice."""
    unit = shape.most.vocab
    for count in range(1, -(-shape.vocab // unit)):
        wide = -(-shape.vocab // count)
        yield wide if count == 1 else -(-wide // unit) * unit
    wide = min(shape.vocab, unit)
    while wide > least:
        yield wide
        wide = _narrower(wide)


def _all_rows(shape: _Shape, rows: int, wide: int) -> int:
    """Bytes of a slice of the logits of all rows, forward and backward."""
    of_slice = shape.converted + (4 if shape.sums_apart else 0)
    of_row = shape.cell * wide + shape.size * (shape.operand.itemsize + 4)
    return rows * of_row + wide * shape.size * of_slice + 8 * ALIGNMENT


def _narrower(wide: int) -> int:
    half = wide // 2
    return max(256, half if half % 128 == 0 else half - half % 256)


def backward_plan(weight: Tensor, head: Head, n: int) -> Tile:
    """The tile of a backward pass over ``n`` rows whose logits are not there any more.

    On a GPU all rows at once, as long as a slice is wide enough beside them: the weight's gradient is then
    one product a slice, and nothing is read and added again for each chunk.  A recomputed logit may differ
    from that of the lse in its last bit, by the library's choice for another number of rows.
    """
    plan, device = tile_plan(weight, head), weight.device
    if device.type == "cpu" or n == 0 or invariance.is_on():
        return plan
    rows = n if n <= plan.tokens else -(-n // GPU_ROWS) * GPU_ROWS
    return _backward_plan(_Shape.of(weight, head), rows, workspace.limit(device), plan)


@functools.lru_cache
def _backward_plan(shape: _Shape, rows: int, limit: int, plan: Tile) -> Tile:
    for wide in _widths(shape, GPU_WHOLE_ROWS):
        if _all_rows(shape, rows, wide) <= limit:
            return Tile(max(rows, plan.tokens), wide)
    # not all rows: as many as one product profits from, beside fp32 sums of a slice of the weight's gradient
    wide = plan.vocab
    per_entry = shape.size * (shape.converted + (0 if shape.dtype == torch.float32 else 4))
    room = (limit - wide * per_entry) // (shape.cell * wide + shape.size * (shape.operand.itemsize + 4))
    return plan._replace(tokens=max(plan.tokens, min(room - room % GPU_ROWS, rows)))


def _whole_rows(shape: _Shape, wide: int) -> tuple[int, int]:
    """Bytes that linear_policy_loss needs at most to keep rows of whole logits: once, and for each row."""
    vocab, size, operand, logits = shape.vocab, shape.size, shape.operand, shape.logits_dtype.itemsize
    fixed = wide * size * shape.converted + (-(-vocab // wide) + 6) * ALIGNMENT
    row = logits * vocab + size * (operand.itemsize + 4)
    row += 0 if shape.logits_dtype == operand else wide * operand.itemsize
    if shape.device.type == "cpu":  # where rows without a derivative are left out
        row += wide * logits + size * operand.itemsize
    return fixed, row


def one_pass_limit(weight: Tensor, head: Head) -> int:
    """The next larger workspace limit, in MiB, with which linear_policy_loss takes one pass over any rows."""
    return _one_pass_limit(_Shape.of(weight, head), workspace.limit(weight.device) // 2**20 + 1)


@functools.lru_cache
def _one_pass_limit(shape: _Shape, least: int) -> int:
    def holds(mib: int) -> bool:
        tokens, wide = _tile_plan.__wrapped__(shape, mib * 2**20)
        fixed, row = _whole_rows(shape, wide)
        return fixed + tokens * row <= mib * 2**20

    return next(mib for mib in itertools.count(least) if holds(mib))


def kept_plans(plan: Tile, n: int, device: torch.device) -> list[Tile]:
    """The tiles in which backward may take logits that ``plan`` left, the best first.

    On a GPU all rows at once, where there is room: the weight's gradient is one product a slice, as in
    ``backward_plan``.
    """
    if device.type == "cpu" or n <= plan.tokens or invariance.is_on():
        return [plan]
    return [plan._replace(tokens=n), plan]


def kept_tiles(tiles: int, size: int, whole: int, used: int, device: torch.device) -> int:
    """How many of ``tiles`` the workspace can hold beside what is ``used`` of it, where one takes at most
    ``size`` bytes and all of them ``whole``.

    On a GPU all or none: backward takes larger tiles where it computes some of them anew.
    """
    room = workspace.limit(device) - used
    if whole <= room:
        return tiles
    return max(min(tiles, room // size), 0) if device.type == "cpu" else 0


def product_kind(compute_dtype: torch.dtype, device: torch.device) -> str:
    """How a GEMM of ``compute_dtype`` gives fp32.

    "direct": its operands are fp32; "out_dtype": the library takes low precision and writes fp32, on GPUs
    where it says that it can; "upcast": the operands are converted to fp32 a tile at a time.
    """
    if compute_dtype == torch.float32:
        return "direct"
    return "out_dtype" if device.type == "cuda" and writes_fp32(compute_dtype, device) else "upcast"


@functools.cache
def writes_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's library multiplies this dtype into fp32, and adds to fp32: asked once, of 8 by 8.

    In CUDA it does.  ROCm's builds of torch differ; converted to fp32 a product takes six times as long.
    """
    if torch.version.hip is None:
        return True
    a = torch.ones(8, 8, dtype=dtype, device=device)
    out = torch.empty(8, 8, device=device)
    try:
        torch.ops.aten.mm.dtype_out(a, a, torch.float32, out=out)
        torch.ops.aten.addmm.dtype_out(out, a, a, torch.float32, out=out)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def operand_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.float32 if product_kind(compute_dtype, device) == "upcast" else compute_dtype


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
    ) -> None:  # fmt: skip
        """``direction``: rows of the hidden states' size are summed in forward.  ``mask`` [n]: operands of
        the other rows are 0, whatever the hidden states hold there."""
        self.source, self.weight, self.head, self.n, self.gathered = hidden, weight, head, n, gathered
        self._gradients, self._of_hidden, self._of_weight = gradients, hidden_gradient, weight_gradient
        self._direction = direction
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
        self.backward_of_kept: Tile | None = None
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
                self.size, self.backward_of_kept = used + layout.size(self._slots) * itemsize, plan
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
        self._logits = part(tokens, wide, dtype=dtype)
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
        if not (self._is_cut or self._direction):
            return tokens  # each chunk's are complete at once
        room = (workspace.limit(self.source.device) - used) // (4 * self.source.shape[1])
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
        self._without_memory = dict(vars(self))
        self._carve(Carver(lease.memory))
        return self

    @property
    def keeps_logits(self) -> bool:
        """Whether logits stay until backward: on a GPU all or none."""
        return self._slots > 0

    def keep(self, owner: Tensor) -> None:
        """Leave the kept tiles to the backward pass that names ``owner``."""
        if self._slots:
            size = self._layout.size(self._slots) * self.head.logits_dtype.itemsize
            note = KeptLogits(self._slots, self._layout, self.backward_of_kept or self.plan)
            workspace.keep(self.source.device, owner, size, note)

    def __exit__(self, *exception: Any) -> None:
        vars(self).update(self._without_memory)  # no part outlives the lease
        self._lease.__exit__(*exception)

    def weight_slices(self) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, rows of the weight as operands of a GEMM), in vocabulary order."""
        if self.n == 0:
            return
        for v0 in range(0, self.weight.shape[0], self.plan.vocab):
            v1 = min(v0 + self.plan.vocab, self.weight.shape[0])
            w = rows_of(self.weight, v0, v1)
            yield v0, v1, w if self._w is None else self._w[: v1 - v0].copy_(w.to(self.head.compute_dtype))

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
