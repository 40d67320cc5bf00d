"""Plans of ``prefix_shared_attention`` whose kernels leave gradients of scores for one another.

The kernel of the gradients of k and v stores what it finds for the plain runs of a whole tile of keys: a row
of the storage is a query, and has a number for each key of the tile.  The kernel of the gradient of q reads
its rows of these instead of computing them again: its plain runs are all stored ones.  For other keys it
looks up in ``PrefixLayout.row_tables`` who sees them, and computes.
"""

from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.prefix.layout import PrefixLayout, Run, joined
from rlkernel.triton_ops.prefix_shared_attention_plan import (
    CHUNK,
    KeyPlan,
    QueryPlan,
    Visits,
    items,
    key_tiles,
    keys_of,
    queries,
    queries_of,
    query_tiles,
)


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
    items: Tensor
    key_runs: Tensor
    sums: Tensor
    slots: int
    rows: int
    heads: int

    @property
    def queries(self) -> QueryPlan:
        return QueryPlan(self.tiles, self.query_runs)

    @property
    def keys(self) -> KeyPlan:
        return KeyPlan(self.items, self.key_runs, self.sums, self.slots)


class Strip(NamedTuple):
    """A plain run of a tile of keys, and where in the storage its first query is."""

    first: int
    end: int
    place: int


class Strips:
    """Which queries are stored for which tile of keys."""

    def __init__(self, visits: list[Visits], block: int) -> None:
        """``visits``: of the tiles of keys; those of tiles that are not whole become masked."""
        self.of: dict[int, list[Strip]] = {}  # by the tile's first key
        self.visits: list[Visits] = []
        self.rows = 0
        for visit in visits:
            first, end = visit.rows
            if end - first < block and visit.plain:
                visit = visit._replace(plain=[], masked=joined(visit.masked + visit.plain))
            self.visits.append(visit)
            for run_first, run_end in visit.plain:
                self.of.setdefault(first, []).append(Strip(run_first, run_end, self.rows))
                self.rows += run_end - run_first
        self._tiles, self._block = sorted(self.of), block

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
        strips = self.of[key]
        return strips[max(bisect_right(strips, query, key=lambda strip: strip.first) - 1, 0)]


def stored_plan(
    layout: PrefixLayout, window: int, of_queries: tuple[int, int], of_keys: tuple[int, int], kv_heads: int,
    sizes: Sizes,
) -> StoredPlan:  # fmt: skip
    """The plan of as many heads of keys at a time as the limit has room for: of none where one has no room.

    ``of_queries``, ``of_keys``: rows of queries and of keys in the blocks of either kernel.
    """
    (block_q, step), (step_q, block_k) = of_queries, of_keys
    found = (queries_of(layout, parts, window, step_q) for parts in key_tiles(layout, block_k))
    strips = Strips(list(found), block_k)
    most = min(sizes.limit // (strips.rows * sizes.row), kv_heads) if strips.rows else 0
    heads = max((n for n in range(1, most + 1) if kv_heads % n == 0), default=0)
    if not heads:
        nothing = torch.empty(0, dtype=torch.int32)
        return StoredPlan(nothing, nothing, nothing, nothing, nothing, 0, 0, 0)
    visits = []
    for parts in query_tiles(layout, block_q):
        visit = keys_of(layout, parts, window, step)
        stored = strips.stored_keys(visit.rows, visit.plain)
        visits.append(
            visit._replace(plain=stored, masked=joined([*visit.masked, *without(visit.plain, stored)]))
        )
    # few heads are few programs: in shorter chunks they end together
    keys = items(strips.visits, step_q, CHUNK // 2, sizes.slots(strips.rows, heads), strips.for_keys)
    tiles, runs = queries(visits, step, strips.for_queries)
    return StoredPlan(tiles, runs, keys.items, keys.runs, keys.sums, keys.slots, strips.rows, heads)


def without(runs: list[Run], taken: list[Run]) -> list[Run]:
    """What of ``runs`` lies in none of those that are taken, which lie inside of them."""
    borders = sorted([*(x for run in runs for x in run), *(x for run in taken for x in run)])
    pieces = zip(borders[::2], borders[1::2], strict=True)
    return [(first, end) for first, end in pieces if first < end]
