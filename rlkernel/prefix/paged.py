"""The plan of ``paged_prefix_attention``: which rows of a step read which pages together.

Requests whose leading blocks are the same form a tree; what a node of it adds is read once for all of the
requests below, in whole tiles.  All of it follows from the tables and lengths of the step, never from the
device.  What a row's bits depend on is told beside ``PagedPlan``; the plan has no part in it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import CHUNK, ITEM, ITEM_ROWS, LAUNCH, TILE, WIDTH, PagedPlan
from rlkernel.prefix.layout import ranges

HOST = ("launches", "widths")  # tensors of a plan that are read here
SLOTS = 1 << 13  # partial results of a head that are there at once, unless one item has more


class _Span(NamedTuple):
    """Consecutive rows of one request."""

    request: int
    first: int  # row of the query
    rows: int
    context: int  # keys in front of the first one
    limit: int  # keys that may be shared: whole tiles of the context

    @property
    def length(self) -> int:
        return self.context + self.rows


class _Open(NamedTuple):
    """A chunk that rows have gone through in part."""

    chunk: int
    slot: int  # of plan row ``first``
    first: int
    level: int


class _Node(NamedTuple):
    """Spans [low, high) in the tree's order, all keys before ``start`` done."""

    low: int
    high: int
    start: int
    open: _Open


_CLOSED = _Open(-1, 0, 0, -1)


def plan_of(
    block_table: Tensor, seq_lens: Sequence[int], query_starts: Sequence[int], block_size: int, window: int
) -> PagedPlan:
    """The plan, on the CPU.

    Args:
        block_table: [B, max_blocks] on the CPU.
        seq_lens: B, each at least the request's number of rows.
        query_starts: B + 1.
        window: 0 for all.

    Raises:
        ValueError: a key is read of a block with a negative number.
    """
    spans = []
    for request, (first, end, length) in enumerate(
        zip(query_starts[:-1], query_starts[1:], seq_lens, strict=True)
    ):
        if first < end:
            context = length - (end - first)
            spans.append(_Span(request, first, end - first, context, context // TILE * TILE))
    planner = _Planner(block_table, seq_lens, block_size, window)
    plan = planner.plan_of_steps(spans) or planner.plan(spans)
    if planner.pages and (lowest := min(planner.pages)) < 0:
        raise ValueError(f"block_table must be >= 0 where a key is read, got {lowest}")
    return plan


class _Planner:
    def __init__(self, block_table: Tensor, lengths: Sequence[int], block_size: int, window: int) -> None:
        self.lengths, self.block_size, self.window = lengths, block_size, window
        self.table = [array("i", row) for row in block_table.tolist()]
        self.pages = array("i")
        self.page_of: dict[int, int] = {}  # where a request's pages begin in ``pages``
        self.items: list[tuple[int, tuple[int, ...]]] = []  # of the pass: level, item
        self.runs: list[tuple[int, int, int]] = []  # of the pass: plan rows, their first slot
        self.slots = 0  # of the pass
        self.rows = 0
        self.read = 0

    def plan_of_steps(self, spans: list[_Span]) -> PagedPlan | None:
        """The plan where each span is one row and no two share a page, as in most steps of decoding: that of
        ``plan``, made in a tenth of the time."""
        leading = [self.table[span.request][0] for span in spans if span.limit]
        alone = len(set(leading)) == len(leading) and all(span.rows == 1 for span in spans)
        if not alone or self._need([(span, 0) for span in spans]) > SLOTS:
            return None
        items: list[tuple[int, ...]] = []
        starts = [0]
        # in the order of ``plan``, which sorts by what might be shared
        spans = [span for span, _ in self._ordered(spans)]
        for row, span in enumerate(spans):
            for position, keys in _pieces(self._seen_from(span.context), span.length):
                page = self._page(span) + position // self.block_size
                items.append((row, row + 1, page, position, keys, len(items), 0))
            starts.append(len(items))
        count = len(items)
        items.sort(key=lambda item: -_cost(item))
        read = sum(span.length - self._seen_from(span.context) for span in spans)
        return PagedPlan(
            _int32([span.first for span in spans]),
            _int32([span.context for span in spans]),
            _int32(self.pages),
            _int32(chain.from_iterable(items)).view(-1, len(ITEM)),
            _int32(starts),
            _int32(range(count)),
            _int32([0, count, 0, len(spans)] if spans else []).view(-1, len(LAUNCH)),
            _int32([0, 1] if spans else []).view(-1, len(WIDTH)),
            count,
            self.block_size,
            self.window,
            len(self.lengths),
            max(self.pages, default=-1),
            read,
            read,
        )

    def plan(self, spans: list[_Span]) -> PagedPlan:
        order: list[_Span] = []
        items: list[tuple[int, ...]] = []
        launches: list[list[int]] = []
        widths: list[list[int]] = []
        starts, slots = (
            [torch.zeros(1, dtype=torch.int64, device="cpu")],
            [torch.zeros(0, dtype=torch.int64, device="cpu")],
        )
        count = 0
        for part in self._passes(self._ordered(spans)):
            before = self.rows
            for spans_of in part:
                order += [span for span, _ in spans_of]
                self._tree(spans_of)
            levels = sorted(self.items, key=lambda x: (x[0], _rows(x[1]) == 1, -_cost(x[1])))
            for i, (level, item) in enumerate(levels):
                if i == 0 or level != levels[i - 1][0]:
                    launches.append([len(items), 0, self.rows, self.rows])
                    widths.append([0, 0])
                items.append(item)
                launches[-1][1] = len(items)
                wide, most = widths[-1]
                widths[-1] = [wide + (_rows(item) > 1), max(most, _rows(item))]
            launches[-1][2] = before
            found, number = self._merges(before)
            starts.append(starts[-1][-1] + number.cumsum(0))
            slots.append(found)
            count = max(count, self.slots)
            self.items, self.runs, self.slots = [], [], 0
        apart = sum(span.length - self._seen_from(span.context) for span in order)
        return PagedPlan(
            ranges([(span.first, span.first + span.rows) for span in order]).int(),
            ranges([(span.context, span.length) for span in order]).int(),
            _int32(self.pages),
            _int32(chain.from_iterable(items)).view(-1, len(ITEM)),
            torch.cat(starts).int(),
            torch.cat(slots).int(),
            _int32(chain.from_iterable(launches)).view(-1, len(LAUNCH)),
            _int32(chain.from_iterable(widths)).view(-1, len(WIDTH)),
            count,
            self.block_size,
            self.window,
            len(self.lengths),
            max(self.pages, default=-1),
            self.read,
            apart,
        )

    # who shares what

    def _ordered(self, spans: list[_Span]) -> list[tuple[_Span, int]]:
        """Spans, those that share blocks side by side, each with the keys that it shares with the next."""
        # bytes compare many times faster than numbers; which of two rows comes first does not matter
        usable = [self.table[s.request][: -(-s.limit // self.block_size)].tobytes() for s in spans]
        order = sorted(range(len(spans)), key=usable.__getitem__)
        found = []
        for i, j in zip(order, [*order[1:], -1], strict=False):  # no row, no spans
            shared = 0
            if j >= 0:
                keys = _alike(usable[i], usable[j]) // self.pages.itemsize * self.block_size
                shared = min(keys, spans[i].limit, spans[j].limit) // TILE * TILE
            found.append((spans[i], shared))
        return found

    def _passes(self, spans: list[tuple[_Span, int]]) -> Iterator[list[list[tuple[_Span, int]]]]:
        """Trees of spans, in passes whose partial results fit in SLOTS."""
        taken: list[list[tuple[_Span, int]]] = []
        used = 0
        for tree in self._trees(spans):
            need = self._need(tree)
            if taken and used + need > SLOTS:
                yield taken
                taken, used = [], 0
            taken.append(tree)
            used += need
        if taken:
            yield taken

    def _trees(self, spans: list[tuple[_Span, int]]) -> Iterator[list[tuple[_Span, int]]]:
        low = 0
        for i, (_, shared) in enumerate(spans):
            if not shared:
                yield from self._cut(spans[low : i + 1])
                low = i + 1

    def _cut(self, tree: list[tuple[_Span, int]]) -> Iterator[list[tuple[_Span, int]]]:
        """The tree in parts that fit, each of which reads what they would have shared."""
        half = len(tree) // 2
        if self._need(tree) <= SLOTS:
            yield tree
        elif half:
            yield from self._cut([*tree[: half - 1], (tree[half - 1][0], 0)])
            yield from self._cut(tree[half:])
        else:
            ((span, _),) = tree
            count = -(-span.rows // 2 // ITEM_ROWS) * ITEM_ROWS
            if count >= span.rows:
                yield tree
                return
            yield from self._cut([(span._replace(rows=count), 0)])
            rest = {"first": span.first + count, "rows": span.rows - count, "context": span.context + count}
            yield from self._cut([(span._replace(**rest), 0)])

    def _need(self, tree: list[tuple[_Span, int]]) -> int:
        """Slots, at most."""
        return sum(
            span.rows * (-(-span.length // CHUNK) - self._seen_from(span.context) // CHUNK)
            for span, _ in tree
        )

    # what is read

    def _tree(self, tree: list[tuple[_Span, int]]) -> None:
        spans, shared = [span for span, _ in tree], [keys for _, keys in tree]
        rows = list(accumulate((span.rows for span in spans), initial=self.rows))
        self.rows = rows[-1]
        nodes = [_Node(0, len(spans), 0, _CLOSED)]
        while nodes:
            low, high, start, last = nodes.pop()
            if high - low == 1:
                self._own(spans[low], rows[low], start, last)
                continue
            depth = min(shared[low : high - 1])
            last = self._shared(spans[low:high], rows[low : high + 1], start, depth, last)
            cuts = [low, *(i + 1 for i in range(low, high - 1) if shared[i] == depth), high]
            nodes += [_Node(a, b, depth, last) for a, b in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]

    def _shared(self, spans: list[_Span], rows: list[int], start: int, end: int, last: _Open) -> _Open:
        """Keys [start, end) with the rows of all spans."""
        seen_from = [self._seen_from(span.context) for span in spans]  # of a span's first row: none sees more
        begin = min(seen_from)
        reader, start = spans[seen_from.index(begin)], max(start, begin)
        for position, keys in _pieces(start, end):
            last = self._opened(position // CHUNK, rows[0], rows[-1], last)
            reading = [i for i, at in enumerate(seen_from) if at < position + keys]
            for first in range(rows[0], rows[-1], ITEM_ROWS):
                stop = min(first + ITEM_ROWS, rows[-1])
                seeing = [seen_from[i] for i in reading if rows[i] < stop and first < rows[i + 1]]
                at = max(position, min(seeing, default=position + keys))
                self._item(reader, first, stop, at, position + keys - at, last)
        self.read += max(0, end - start)
        return last

    def _own(self, span: _Span, row: int, start: int, last: _Open) -> None:
        """The keys from ``start`` on with the rows of a span, as far as each tile of rows sees."""
        for a in range(0, span.rows, ITEM_ROWS):
            b, at = min(a + ITEM_ROWS, span.rows), last
            begin = max(start, self._seen_from(span.context + a))
            for position, keys in _pieces(begin, span.context + b):
                at = self._opened(position // CHUNK, row + a, row + b, at)
                self._item(span, row + a, row + b, position, keys, at)
        self.read += span.length - max(start, self._seen_from(span.context))

    def _opened(self, chunk: int, first: int, end: int, last: _Open) -> _Open:
        """The chunk's state of the rows: that which is there, else a new one."""
        if last.chunk == chunk:
            return last._replace(level=last.level + 1)
        self.runs.append((first, end, self.slots))
        self.slots += end - first
        return _Open(chunk, self.slots - (end - first), first, 0)

    def _item(self, span: _Span, first: int, end: int, position: int, keys: int, of: _Open) -> None:
        page = self._page(span) + position // self.block_size
        item = first, end, page, position, keys, of.slot + first - of.first, int(of.level > 0)
        self.items.append((of.level, item))

    def _page(self, span: _Span) -> int:
        """Where the pages of the span's request would begin, those that no row sees left out."""
        if span.request not in self.page_of:
            first = self._seen_from(span.context) // self.block_size
            self.page_of[span.request] = len(self.pages) - first
            self.pages += self.table[span.request][first : -(-self.lengths[span.request] // self.block_size)]
        return self.page_of[span.request]

    def _seen_from(self, position: int) -> int:
        return max(0, position + 1 - self.window) if self.window else 0

    def _merges(self, before: int) -> tuple[Tensor, Tensor]:
        """The slots of the pass's rows, row by row in the order of their keys, and how many each row has."""
        # a row's runs were opened in the order of its keys
        rows = ranges([(first - before, end - before) for first, end, _ in self.runs])
        slots = ranges([(slot, slot + end - first) for first, end, slot in self.runs])
        slots = slots[rows.argsort(stable=True)]
        return slots, rows.bincount(minlength=self.rows - before)


def _int32(values: Iterable[int]) -> Tensor:
    """In a third of the time that ``torch.tensor`` takes."""
    held = array("i", values)
    return (
        torch.frombuffer(held, dtype=torch.int32) if held else torch.empty(0, dtype=torch.int32, device="cpu")
    )


def _pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Keys [start, end), chunk by chunk: (first one, how many)."""
    while start < end:
        stop = min(end, (start // CHUNK + 1) * CHUNK)
        yield start, stop - start
        start = stop


def _rows(item: tuple[int, ...]) -> int:
    return item[1] - item[0]


def _cost(item: tuple[int, ...]) -> int:
    return (_rows(item) + 4) * item[4]  # reading a key costs as much as some rows


def _alike(a: bytes, b: bytes) -> int:
    """How many leading bytes are the same, found by comparing slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def on(plan: PagedPlan, device: torch.device) -> PagedPlan:
    """The plan with its tensors on a device, by one copy; ``launches`` and ``widths`` stay."""
    if device.type == "cpu":
        return plan
    names = [n for n in plan._fields if isinstance(getattr(plan, n), Tensor) and n not in HOST]
    parts = [getattr(plan, name).flatten() for name in names]
    # each begins at a multiple of 16 bytes: Triton compiles anew where one does not
    padded = [torch.nn.functional.pad(x, (0, -len(x) % 4)) for x in parts]
    every = torch.cat(padded).to(device).split([len(x) for x in padded])
    moved = {
        name: x[: len(part)].view(getattr(plan, name).shape)
        for name, x, part in zip(names, every, parts, strict=True)
    }
    return plan._replace(**moved)
