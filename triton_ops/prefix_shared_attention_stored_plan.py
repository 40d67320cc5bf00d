"""Plans of ``prefix_shared_attention`` whose kernels leave gradients of scores for one another.

The kernel of the gradients of k and v stores what it finds for the plain runs of a whole tile of keys: a row
of the storage is a query, and has a number for each key of the tile.  The kernel of the gradient of q reads
its rows of these instead of computing them again: its plain runs are all stored ones.  For other keys it
looks up in ``PrefixLayout.row_tables`` who sees them, and computes.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.prefix.layout import PrefixLayout, Run, joined
from rlkernel.triton_ops.prefix_shared_attention_plan import (
    CHUNK,
    KeyPlan,
    Part,
    QueryPlan,
    Visits,
    items,
    key_tiles,
    keys_of,
    queries,
    queries_of,
    query_tiles,
    whole_blocks,
)

MOST_SPANS = 128  # the host's work grows with their number times that of the tiles
# of the limit, where the heads or the queries are not taken all at once: what less of it holds saves a GPU
# less time than the host takes to launch two more kernels
LEAST_LIMIT = 512 << 20


class Sizes(NamedTuple):
    """Bytes, for each head of keys, and the most of all."""

    row: int  # of the storage
    slot: int  # of the partial sums of a tile
    limit: int

    def slots(self, rows: int, heads: int) -> int:
        """Partial sums of a head that there is room for beside so many rows."""
        return (self.limit // heads - rows * self.row) // self.slot


class StoredPlan(NamedTuple):
    """Both plans, the rows of the storage for each head of queries, and how many heads of keys have room."""

    tiles: Tensor
    query_runs: Tensor
    tile_spans: tuple[int, ...]
    items: Tensor
    key_runs: Tensor
    sums: Tensor
    slots: int
    item_spans: tuple[int, ...]
    rows: int
    heads: int

    @property
    def queries(self) -> QueryPlan:
        return QueryPlan(self.tiles, self.query_runs, self.tile_spans)

    @property
    def keys(self) -> KeyPlan:
        return KeyPlan(self.items, self.key_runs, self.sums, self.slots, self.item_spans)


_EMPTY = torch.empty(0, dtype=torch.int32, device="cpu")
NOTHING = StoredPlan(_EMPTY, _EMPTY, (), _EMPTY, _EMPTY, _EMPTY, 0, (), 0, 0)


class Strip(NamedTuple):
    """A plain run of a tile of keys, and where in the storage its first query is."""

    first: int
    end: int
    place: int


class Strips:
    """Which queries are stored for which tile of keys."""

    def __init__(self, visits: list[Visits], block: int) -> None:
        """``visits``: of the tiles of keys, ``block`` of them in each that has plain runs."""
        self._of: dict[int, list[Strip]] = {}  # by the tile's first key
        self.rows = 0
        for visit in visits:
            for first, end in visit.plain:
                self._of.setdefault(visit.rows[0], []).append(Strip(first, end, self.rows))
                self.rows += end - first
        self._tiles, self._block = sorted(self._of), block

    def for_keys(self, key: int, runs: list[Run]) -> list[tuple[int, ...]]:
        """Runs of queries, as the table of a tile of keys has them."""
        return [(*run, self._place(key, run[0]), 0, 0) for run in runs]

    def for_queries(self, query: int, tiles: list[Run]) -> list[tuple[int, ...]]:
        """Tiles of keys, as the table of a tile of queries has them.

        Those that follow each other are one run as long as their places are those of a parabola, for a
        kernel that had to look each of them up would wait for it.
        """
        found: list[tuple[int, ...]] = []
        for first, end in tiles:
            place = self._place(first, query)
            if found and found[-1][1] == first:
                run_first, _, begin, step, change = found[-1]
                n = (first - run_first) // self._block
                if n == 1:
                    step = place - begin
                elif n == 2:
                    change = place - begin - 2 * step
                if place == begin + n * step + change * (n * (n - 1) // 2):
                    found[-1] = run_first, end, begin, step, change
                    continue
            found.append((first, end, place, 0, 0))
        return found

    def _place(self, key: int, query: int) -> int:
        strip = self._strip(key, query)
        return strip.place + query - strip.first

    def stored_keys(self, rows: Run, plain: list[Run]) -> list[Run]:
        """The tiles of keys inside of ``plain`` for which all these rows are stored."""
        found = []
        for first, end in plain:
            for key in self._tiles[bisect_right(self._tiles, first - 1) :]:
                if key + self._block > end:
                    break
                strip = self._strip(key, rows[0])
                if strip.first <= rows[0] and rows[1] <= strip.end:
                    found.append((key, key + self._block))
        return found

    def _strip(self, key: int, query: int) -> Strip:
        strips = self._of[key]
        return strips[max(bisect_right(strips, query, key=lambda strip: strip.first) - 1, 0)]


def stored_plan(
    layout: PrefixLayout, window: int, of_queries: tuple[int, int], of_keys: tuple[int, int], kv_heads: int,
    sizes: Sizes,
) -> StoredPlan:  # fmt: skip
    """The plan of as many heads of keys at a time as the limit has room for; of none where it is too small.

    7 of 8 parts of the limit hold what is stored, the rest the partial sums: without room for these a program
    would take a prompt's tile with the rows of all completions, and most of the GPU wait for it.  Where there
    is no room for one head, queries are taken a span of rows at a time, and the next span goes on with the
    partial sums.

    ``of_queries``, ``of_keys``: rows of queries and of keys in the blocks of either kernel.
    """
    (block_q, step), (step_q, block_k) = of_queries, of_keys
    found = (queries_of(layout, parts, window, step_q) for parts in key_tiles(layout, block_k))
    visits = [visit if _size(visit.rows) == block_k else _masked(visit) for visit in found]
    stored = sum(_size(run) for visit in visits for run in visit.plain)
    room = sizes.limit // 8 * 7 // sizes.row
    most = min(room // stored, kv_heads) if stored else 0
    heads = max((n for n in range(1, most + 1) if kv_heads % n == 0), default=1)
    tiles = list(query_tiles(layout, block_q))
    spans = [(0, layout.total)] if most else list(_spans(tiles, visits, room))
    in_parts = most < kv_heads
    if not stored or len(spans) > MOST_SPANS or (in_parts and sizes.limit < LEAST_LIMIT):
        return NOTHING
    if not most and _in_several(visits, spans) > sizes.slots(room, 1):  # each of which has a partial sum
        return NOTHING
    of_spans = [visits] if most else [[_inside(visit, span, step_q) for visit in visits] for span in spans]
    strips = [Strips(of_span, block_k) for of_span in of_spans]
    rows = max(x.rows for x in strips)
    most_slots = sizes.slots(rows, heads)
    # few heads are few programs: in shorter chunks they end together
    keys = items(of_spans, step_q, CHUNK // 2, most_slots, [x.for_keys for x in strips])
    if keys.slots > most_slots:
        return NOTHING
    read = []
    for span, x in zip(spans, strips, strict=True):
        own = (keys_of(layout, parts, window, step) for parts in tiles if span[0] <= parts[0].first < span[1])
        read.append([_read(visit, x.stored_keys(visit.rows, visit.plain)) for visit in own])
    found_queries = queries(read, step, [x.for_queries for x in strips])
    return StoredPlan(
        found_queries.tiles, found_queries.runs, found_queries.spans,
        keys.items, keys.runs, keys.sums, keys.slots, keys.spans, rows, heads,
    )  # fmt: skip


def _spans(tiles: list[list[Part]], visits: list[Visits], most: int) -> Iterator[Run]:
    """Rows of queries, whole tiles of them, for which at most so many rows are stored; else nothing."""
    change = [0] * (tiles[-1][-1].end + 1) if tiles else [0]
    for visit in visits:
        for first, end in visit.plain:
            change[first] += 1
            change[end] -= 1
    before = [0, *accumulate(accumulate(change))]  # rows that are stored for the queries before each
    begin = 0
    for first, end in ((parts[0].first, parts[-1].end) for parts in tiles):
        if before[end] - before[begin] > most and begin < first:
            yield begin, first
            begin = first
    if tiles:
        yield begin, tiles[-1][-1].end


def _in_several(visits: list[Visits], spans: list[Run]) -> int:
    """How many tiles of keys have queries in more than one span."""
    begins = [begin for begin, _ in spans]
    ends = [(min(runs)[0], max(end for _, end in runs) - 1) for runs in (x.plain + x.masked for x in visits)]
    return sum(bisect_right(begins, first) != bisect_right(begins, last) for first, last in ends)


def _inside(visit: Visits, span: Run, block: int) -> Visits:
    """What a tile visits of a span."""
    if not any(first < span[1] and span[0] < end for runs in visit[1:] for first, end in runs):
        return Visits(visit.parts, [], [])
    plain, masked = ([(max(first, span[0]), min(end, span[1])) for first, end in runs] for runs in visit[1:])
    return whole_blocks(visit.parts, plain, masked, block)


def _masked(visit: Visits) -> Visits:
    return visit._replace(plain=[], masked=joined(visit.masked + visit.plain))


def _read(visit: Visits, stored: list[Run]) -> Visits:
    """What a tile of queries visits, its plain runs only where they are stored."""
    return visit._replace(plain=stored, masked=joined([*visit.masked, *without(visit.plain, stored)]))


def _size(run: Run) -> int:
    return run[1] - run[0]


def without(runs: list[Run], taken: list[Run]) -> list[Run]:
    """What of ``runs`` lies in none of those that are taken, which lie inside of them."""
    borders = sorted([*(x for run in runs for x in run), *(x for run in taken for x in run)])
    pieces = zip(borders[::2], borders[1::2], strict=True)
    return [(first, end) for first, end in pieces if first < end]
