"""Which tiles the kernels of ``prefix_shared_attention`` compute, and which rows each of them visits.

A tile is a run of rows: of queries, or of keys.  What it visits is a list of runs, first the plain ones
(every pair of the tile and the run sees each other, whole blocks of rows), then those whose pairs the kernel
looks up in ``PrefixLayout.row_tables``.  Rows that no row of the tile sees, siblings and rows outside of the
window, are in neither.

All of it follows from lengths, block sizes and head counts, never from the device: the same sums in the same
order everywhere.  Tiles that take longest come first, so that the last programs of a launch are short ones.
The host's work grows with the number of tiles and segments, and is done once for a layout, not once a layer.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.prefix.layout import PrefixLayout, Run, joined

CHUNK = 2048  # rows that one program visits for a tile of keys, at least: partial sums cost 4 % of its time
PARTIAL_BYTES = 64 << 20  # of all partial sums of keys and values together

# columns of the tables
ROWS = ("first", "end")
# where gradients of scores are stored: those of its first tile, how much further those of the next, and how
# much more each of the following
RUN = (*ROWS, "stored", "step", "change")
TILE = (*ROWS, "plain", "masked", "stop")  # rows of the tile; its first run, the first masked one, the end
# where the partial sum goes, -1: it is the whole sum; 1: to add to what an item of an earlier span left there
ITEM = (*TILE, "slot", "goes_on")
SUM = (*ROWS, "begin", "stop")  # rows of a tile in several items; its first partial sum, the end


Place = Callable[[int, list[Run]], list[tuple[int, ...]]]


def nowhere(tile: int, runs: list[Run]) -> list[tuple[int, ...]]:
    """Runs that a tile visits, as their table has them, whose gradients of scores are not stored."""
    return [(*run, 0, 0, 0) for run in runs]


class QueryPlan(NamedTuple):
    tiles: Tensor  # int32 [N, TILE]
    runs: Tensor  # int32 [R, RUN], of keys
    spans: tuple[int, ...]  # where the tiles of each span of rows end


class KeyPlan(NamedTuple):
    items: Tensor  # int32 [N, ITEM]
    runs: Tensor  # int32 [R, RUN], of queries
    sums: Tensor  # int32 [M, SUM]
    slots: int  # number of partial sums
    spans: tuple[int, ...]  # items of queries up to a row, one span of rows after the other: where each ends


class Part(NamedTuple):
    """Rows of a tile that belong to one segment."""

    segment: int
    first: int
    end: int


class Visits(NamedTuple):
    parts: list[Part]
    plain: list[Run]
    masked: list[Run]

    @property
    def rows(self) -> Run:
        return self.parts[0].first, self.parts[-1].end

    def blocks(self, block: int) -> int:
        return sum(-(-(end - first) // block) for first, end in self.plain + self.masked)


def query_plan(layout: PrefixLayout, window: int, block_q: int, block_k: int) -> QueryPlan:
    """Tiles span siblings: short completions of a prompt fill a tile together."""
    visits = [keys_of(layout, parts, window, block_k) for parts in query_tiles(layout, block_q)]
    return queries([visits], block_k)


def logical_plan(layout: PrefixLayout, window: int, block_q: int, block_k: int) -> QueryPlan:
    """Runs of ``layout.gathered().keys`` whose blocks are cut at positions in the sequence.

    So a row takes part in the same operations, in the same order, whatever it shares.
    """
    visits, before = [], 0
    for s, (start, end) in enumerate(map(layout.rows, range(len(layout.lengths)))):
        offset = layout.offsets[s]
        for first in range(start, end, block_q):
            stop = min(first + block_q, end)
            lowest = max(0, offset + first - start - window + 1) if window else 0
            run = before + lowest // block_k * block_k, before + offset + stop - start
            visits.append(Visits([Part(s, first, stop)], [], [run]))
        before += offset + end - start
    return queries([visits], block_k)


def queries(spans: list[list[Visits]], block_k: int, places: Sequence[Place] = (nowhere,)) -> QueryPlan:
    """The plan of the tiles of queries of each span; ``place(row, runs)``: where plain runs are stored."""
    tiles: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    ends: list[int] = []
    for visits, place in zip(spans, places, strict=True):
        for visit in sorted(visits, key=lambda x: -x.blocks(block_k)):
            begin = len(runs)
            runs += place(visit.rows[0], visit.plain)
            masked = len(runs)
            runs += nowhere(visit.rows[0], visit.masked)
            tiles.append((*visit.rows, begin, masked, len(runs)))
        ends.append(len(tiles))
    return QueryPlan(_table(tiles, len(TILE)), _table(runs, len(RUN)), tuple(ends))


def key_plan(layout: PrefixLayout, window: int, block_q: int, block_k: int, slot_bytes: int) -> KeyPlan:
    """``slot_bytes``: what the partial sums of one tile take."""
    visits = [queries_of(layout, parts, window, block_q) for parts in key_tiles(layout, block_k)]
    return items([visits], block_q, CHUNK, PARTIAL_BYTES // slot_bytes)


def items(
    spans: list[list[Visits]], block_q: int, chunk_rows: int, most_slots: int,
    places: Sequence[Place] = (nowhere,),
) -> KeyPlan:  # fmt: skip
    """The plan of tiles of keys, from what all of them visit in each of the ``spans`` of queries.

    A prompt's keys are visited by all of its completions, which is many times what a completion's are.  So a
    tile's rows are cut into chunks, whose sums a second kernel adds up in their order.  The chunk grows until
    there is room for all partial sums: more rows are then in longer chunks, and where there are many tiles,
    in one.  The chunks of a later span go on with the sums of those before.

    ``places``: for each span, ``place(row, runs)`` says of plain runs where they are to be stored.
    """
    of_tiles = list(zip(*spans, strict=True))
    sizes = [[visit.blocks(block_q) for visit in visits] for visits in of_tiles]
    longest = max((max(of_tile) for of_tile in sizes), default=0)
    chunk = max(1, chunk_rows // block_q)
    while chunk < longest and sum(_slots(of_tile, chunk) for of_tile in sizes) > most_slots:
        chunk *= 2
    found: list[list[tuple[int, tuple[int, int], Visits]]] = [[] for _ in spans]
    sums: list[tuple[int, ...]] = []
    slot = 0
    for visits, of_tile in zip(of_tiles, sizes, strict=True):
        slots = _slots(of_tile, chunk)
        begun = 0
        for of_span, visit, size in zip(found, visits, of_tile, strict=True):
            if size and not slots:
                of_span.append((size, (-1, 0), visit))
            elif size:
                for number, piece in enumerate(_chunks(visit, chunk, block_q)):
                    where = slot + number, int(number < begun)
                    of_span.append((piece.blocks(block_q), where, piece))
                begun = max(begun, number + 1)
        if slots:
            sums.append((*visits[0].rows, slot, slot + slots))
            slot += slots
    rows: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    ends: list[int] = []
    for of_span, place in zip(found, places, strict=True):
        for _, where, piece in sorted(of_span, key=lambda x: -x[0]):
            begin, (first, end) = len(runs), piece.rows
            runs += place(first, piece.plain) + nowhere(first, piece.masked)
            rows.append((first, end, begin, begin + len(piece.plain), len(runs), *where))
        ends.append(len(rows))
    return KeyPlan(_table(rows, len(ITEM)), _table(runs, len(RUN)), _table(sums, len(SUM)), slot, tuple(ends))


def _slots(sizes: list[int], chunk: int) -> int:
    """Partial sums of a tile that visits so many blocks in each span; 0: its only chunk has the whole sum."""
    chunks = [-(-size // chunk) for size in sizes]
    return max(chunks) if sum(chunks) > 1 else 0


# tiles


def query_tiles(layout: PrefixLayout, block: int) -> Iterator[list[Part]]:
    """A tile goes on into the next segment where it visits already all that stands above that one."""

    def goes_on(parts: list[Part], s: int) -> bool:
        parent = layout.parents[s]
        return parent < 0 or any(_is_below(layout, part.segment, parent) for part in parts)

    return _tiles(layout, block, goes_on)


def key_tiles(layout: PrefixLayout, block: int) -> Iterator[list[Part]]:
    """A tile goes on into the next segment unless completions stand below a prompt segment of the two."""

    def is_alone(s: int) -> bool:
        below = layout.rows_below(s)
        return not layout.completion[s] and any(stop > layout.n_prefix for _, stop in below)

    return _tiles(layout, block, lambda parts, s: not is_alone(s) and not is_alone(parts[-1].segment))


def _tiles(
    layout: PrefixLayout, block: int, goes_on: Callable[[list[Part], int], bool]
) -> Iterator[list[Part]]:
    parts: list[Part] = []
    for s, (first, end) in enumerate(map(layout.rows, range(len(layout.lengths)))):
        if parts and not goes_on(parts, s):
            yield parts
            parts = []
        while first < end:
            stop = min(end, first + block - _size(parts))
            parts = [*parts, Part(s, first, stop)]
            first = stop
            if _size(parts) == block:
                yield parts
                parts = []
    if parts:
        yield parts


def _size(parts: list[Part]) -> int:
    return parts[-1].end - parts[0].first if parts else 0


# what a tile visits


def keys_of(layout: PrefixLayout, parts: list[Part], window: int, block: int) -> Visits:
    plain: list[Run] = []
    masked: list[Run] = []
    mine = {part.segment: part for part in parts}
    for a in {a for part in parts for a in layout.path(part.segment)}:
        start, stop = layout.rows(a)
        own = mine.get(a)
        seeing = [p for p in parts if _is_below(layout, p.segment, a)] if layout.rows_below(a) else [mine[a]]
        if seeing == [own]:
            stop = seeing[0].end
        # keys [begin, end) are seen by every row
        begin, end = start, start
        if len(seeing) == len(parts):
            end = stop if own is None else own.first
        low = start
        if window:
            oldest = [p.first + _shift(layout, p.segment) for p in seeing]
            newest = [p.end - 1 + _shift(layout, p.segment) for p in seeing]
            low = max(start, min(oldest) - window + 1 - _shift(layout, a))
            begin = max(start, max(newest) - window + 1 - _shift(layout, a))
        if begin < end:
            masked += [(low, begin), (end, stop)]
            plain.append((begin, end))
        else:
            masked.append((low, stop))
    return whole_blocks(parts, plain, masked, block)


def queries_of(layout: PrefixLayout, parts: list[Part], window: int, block: int) -> Visits:
    plain: list[Run] = []
    masked: list[Run] = []
    for part in parts:
        s, (_, end) = part.segment, layout.rows(part.segment)
        after, below = (part.end, end), layout.rows_below(s)
        masked.append((part.first, part.end))
        if not window:
            (plain if len(parts) == 1 else masked).extend([after, *below])
            continue
        newest, oldest = (row + _shift(layout, s) for row in (part.end - 1, part.first))
        for b, (row, stop) in [(s, after), *((b, layout.rows(b)) for b in _inside(layout, below))]:
            reach = min(stop, newest + window - _shift(layout, b))  # no row from here on sees any key
            whole = len(parts) == 1 and reach <= oldest + window - _shift(layout, b)
            (plain if whole else masked).append((row, reach))
    return whole_blocks(parts, plain, masked, block)


def whole_blocks(parts: list[Part], plain: list[Run], masked: list[Run], block: int) -> Visits:
    """Runs that continue each other are one; what plain runs have beyond whole blocks is masked."""
    whole = []
    for first, end in joined(plain):
        stop = end - (end - first) % block
        whole.append((first, stop))
        masked = [*masked, (stop, end)]
    return Visits(parts, [run for run in whole if run[0] < run[1]], joined(masked))


def _chunks(visit: Visits, chunk: int, block: int) -> Iterator[Visits]:
    """The visit's runs in pieces of ``chunk`` blocks."""
    pieces: tuple[list[Run], list[Run]] = ([], [])
    room = chunk
    for kind, runs in enumerate((visit.plain, visit.masked)):
        for first, end in runs:
            while first < end:
                stop = min(end, first + room * block)
                pieces[kind].append((first, stop))
                room -= -(-(stop - first) // block)
                first = stop
                if not room:
                    yield Visits(visit.parts, *pieces)
                    pieces, room = ([], []), chunk
    if pieces[0] or pieces[1]:
        yield Visits(visit.parts, *pieces)


def _is_below(layout: PrefixLayout, s: int, a: int) -> bool:
    """Whether segment s is a or stands below it."""
    first, last = layout.numbers[a]
    return first <= layout.numbers[s][0] < last


def _inside(layout: PrefixLayout, runs: list[Run]) -> list[int]:
    """The segments whose rows the runs are."""
    borders = [(bisect_left(layout.starts, first), bisect_left(layout.starts, end)) for first, end in runs]
    return [s for first, end in borders for s in range(first, end)]


def _shift(layout: PrefixLayout, s: int) -> int:
    """What is added to a row of segment s to have its position."""
    return layout.offsets[s] - layout.starts[s]


def _table(rows: list[tuple[int, ...]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(-1, columns)
