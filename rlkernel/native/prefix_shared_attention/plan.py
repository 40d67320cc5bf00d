"""The calls of a dense attention kernel that make a prefix-shared one, on the CPU; lengths alone decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.prefix.layout import PrefixLayout, Run, ranges

ROWS = 1024  # of one call on a segment above: kernels take their largest tile, and temporaries stay small
SHORT = 32  # segments up to this length are padded and attended to together
BATCH_ROWS = 512  # keys of such a batch: more calls cost nothing then, and a copy stays in the cache
TILE = 128  # rows that share a window's keys
BITWISE_TILE = 64


class Block(NamedTuple):
    """Rows that see all rows of a segment above, or, ``causal``, each other."""

    rows: Run
    keys: Run
    causal: bool


class Tile(NamedTuple):
    """A segment's consecutive rows, and their keys: ``above`` rows before the first one, and themselves."""

    rows: list[Run]
    keys: list[Run]
    above: int
    skip: int  # the first rows, which complete the tile and belong to another one


class Batch(NamedTuple):
    """Tiles with as many keys above, padded to one length by copies of their last row.

    A copy comes after all rows of its tile, which do not see it.
    """

    n: int
    size: int  # N, rows of a tile
    above: int  # of its N + above keys
    rows: list[Run] | Tensor  # of one tile the runs, of more the index [n * N]
    keys: list[Run] | Tensor
    take: slice | Tensor  # of the n * N rows, those that are no padding and belong here
    to: slice | Tensor  # their rows in the packed batch
    runs: list[tuple[int, Run]]  # real keys: where a run's first one stands in n * M, and its rows


class Plan(NamedTuple):
    batches: list[Batch]
    blocks: list[Block]
    most_above: int


def plan(layout: PrefixLayout, window: int, bitwise: bool) -> Plan:
    """Every row is in one batch or causal block first, then in the other blocks of the segments above it."""

    def make() -> Plan:
        tiles = list(_tiles(layout, window, bitwise))
        blocks = [] if window or bitwise else list(_blocks(layout))
        batches = list(_batches(tiles, bitwise))
        return Plan(batches, blocks, max((b.above for b in batches), default=0))

    return layout._on("cpu", f"native {window} {bitwise}", make)


def _blocks(layout: PrefixLayout) -> Iterator[Block]:
    segments = [layout.rows(s) for s in range(len(layout.lengths))]
    yield from (Block(own, own, True) for own in segments if own[1] - own[0] > SHORT)
    for s, own in enumerate(segments):
        for first, end in layout.rows_below(s):
            yield from (Block((a, min(a + ROWS, end)), own, False) for a in range(first, end, ROWS))


def _tiles(layout: PrefixLayout, window: int, bitwise: bool) -> Iterator[Tile]:
    for s, length in enumerate(layout.lengths):
        if not window and not bitwise:
            if length <= SHORT:
                yield Tile([layout.rows(s)], [layout.rows(s)], 0, 0)
            continue
        path = [layout.rows(a) for a in layout.path(s)]
        offset = layout.offsets[s]
        size = BITWISE_TILE if bitwise else TILE
        # tiles of bitwise parity are cut at positions, so that a row has the same keys in the same places
        # whether its prompt is shared or not
        begin = offset // size * size if bitwise else offset
        for a in range(begin, offset + length, size):
            b = min(a + size, offset + length)
            first = max(a - window + 1, 0) if window else 0
            if bitwise:
                first = first // size * size
            yield Tile(_cut(path, a, b), _cut(path, first, b), a - first, max(offset - a, 0))


def _cut(path: list[Run], first: int, end: int) -> list[Run]:
    """The rows at positions [first, end) of a path."""
    found, at = [], 0
    for a, b in path:
        x, y = max(first - at, 0), min(end - at, b - a)
        if x < y:
            found.append((a + x, a + y))
        at += b - a
    return found


def _batches(tiles: list[Tile], bitwise: bool) -> Iterator[Batch]:
    if bitwise:
        for tile in tiles:
            yield _batch([tile], BITWISE_TILE)
        return
    # within a factor of two in length, so that less than half is padding
    order = sorted(tiles, key=lambda tile: (tile.above, _length(tile.rows)))
    found: list[Tile] = []
    for tile in order:
        if found:
            size, first = _length(tile.rows), found[0]
            is_full = (len(found) + 1) * (size + first.above) > BATCH_ROWS
            if is_full or tile.above != first.above or size >= 2 * _length(first.rows):
                yield _batch(found, _length(found[-1].rows))
                found = []
        found.append(tile)
    if found:
        yield _batch(found, _length(found[-1].rows))


def _batch(tiles: list[Tile], size: int) -> Batch:
    above, runs = tiles[0].above, []
    for i, tile in enumerate(tiles):
        at = i * (above + size)
        for a, b in tile.keys:
            runs.append((at, (a, b)))
            at += b - a
    if len(tiles) == 1:
        (tile,) = tiles
        end = tile.rows[-1][1]  # the rows that belong here are of one segment, the last one
        length = _length(tile.rows)
        take, to = slice(tile.skip, length), slice(end - (length - tile.skip), end)
        return Batch(1, size, above, tile.rows, tile.keys, take, to, runs)
    rows = [_index(tile.rows, size) for tile in tiles]
    keys = [_index(tile.keys, above + size) for tile in tiles]
    real = [slice(i * size, i * size + _length(tile.rows)) for i, tile in enumerate(tiles)]
    places, index = torch.arange(len(tiles) * size, device="cpu"), torch.cat(rows)
    taken = torch.cat([places[part] for part in real])
    return Batch(len(tiles), size, above, index, torch.cat(keys), taken, index[taken], runs)


def _length(runs: list[Run]) -> int:
    return sum(b - a for a, b in runs)


def _index(runs: list[Run], length: int) -> Tensor:
    """The rows of the runs, and the last one again up to a length."""
    index = ranges(runs)
    return torch.cat([index, index[-1:].expand(length - len(index))])
