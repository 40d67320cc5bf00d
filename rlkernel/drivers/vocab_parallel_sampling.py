"""``sample`` of a vocabulary that the ranks of a process group share out.

Two ways, and on neither has a rank all rows of all logits.  Both give the bits of the whole rows on one rank.

``from_records``, for rows that nobody filters: each rank runs the first of the two kernels of sampling over
its own splits of 4096 tokens, one gather brings the records to all ranks, and each runs the second kernel
over them.  Shards seldom end where a split does: the tokens in front of a rank's first split go to the rank
where their split begins.  Bytes sent by a rank: ``104 N`` for each of its splits, ``b N`` for each token
(fewer than 4096 a row) that moves.

``dealt``, for all others: each rank takes an equal share of the rows, whole.  Bytes sent by a rank: ``b N V_r
(R - 1) / R``, where a gather of the logits sends R times that; a rank holds ``b N V / R`` of them.
``collected`` then brings what it found of its rows to all ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.calls.sampling import RECORD, SPLIT, SampleStats, Sampling, Scratch
from rlkernel.drivers.rank_tree import bytes_of
from rlkernel.drivers.vocab_parallel import gathered, group_of

# (first row, row behind the last, first entry, logits) of each tile of the entries from one to another; tiles
# follow each other by multiples of SPLIT, and the next one may take the memory of the last
Tiles = Callable[[int, int], Iterable[tuple[int, int, int, Tensor]]]


class Shards(NamedTuple):
    """The entries of the vocabulary, from one to another, that each rank has: in any order of the ranks, and
    some may have none."""

    group: str
    rank: int
    spans: tuple[tuple[int, int], ...]

    @property
    def vocab(self) -> int:
        return max(end for _, end in self.spans)

    @property
    def own(self) -> tuple[int, int]:
        return self.spans[self.rank]

    def splits(self, rank: int) -> tuple[int, int]:
        """The splits that begin on a rank: the first of them, and the one behind the last."""
        start, end = self.spans[rank]
        return _up(start) // SPLIT, _up(end) // SPLIT

    def edge(self, rank: int) -> tuple[int, int]:
        """The entries in front of the first of them, which belong to a split that begins elsewhere."""
        start, end = self.spans[rank]
        return start, min(_up(start), end)

    def holder(self, rank: int) -> int | None:
        """The rank where that split begins; None where there is no such entry."""
        start, end = self.edge(rank)
        at = start // SPLIT * SPLIT
        return next(r for r, (a, b) in enumerate(self.spans) if a <= at < b) if start < end else None

    def rows(self, total: int, rank: int) -> tuple[int, int]:
        """Those that a rank gets of rows that are dealt out."""
        part = -(-total // len(self.spans))
        return min(rank * part, total), min((rank + 1) * part, total)


def from_records(
    kernels: Any,
    tiles: Tiles,
    shards: Shards,
    request: Sampling,
    like: Tensor,
) -> SampleStats:
    """The statistics of all rows, none of which may be filtered.  ``like`` [N, 0] has the dtype of tiles."""
    rows = like.shape[0]
    scratch = Scratch.of(rows, shards.vocab, request, like.device)
    if rows:
        _, first = shards.edge(shards.rank)
        _, end = shards.own
        moved = _moved(tiles, shards, like)
        # what others add to the last split makes a tile of its own
        last = end if moved is None else end // SPLIT * SPLIT
        for a, b, v0, tile in tiles(first, last) if first < last else ():
            part = (request, scratch) if b - a == rows else (request.of_rows(a, b), scratch.of_rows(a, b))
            kernels.tile_statistics(tile, None, v0, *part)
        if moved is not None:
            tile = torch.cat([_whole(tiles, last, end, like), moved], 1)
            kernels.tile_statistics(tile, None, last, request, scratch)
        _exchange(scratch.records, shards)
    stats: SampleStats = kernels.finish(None, None, request, scratch)
    return stats


def _whole(tiles: Tiles, begin: int, end: int, like: Tensor) -> Tensor:
    """Fewer than SPLIT entries, in memory of their own."""
    parts = [tile.clone() for _, _, _, tile in tiles(begin, end)] if begin < end else [like]
    return torch.cat(parts)


def _moved(tiles: Tiles, shards: Shards, like: Tensor) -> Tensor | None:
    """The entries of this rank's last split that other ranks have; None where it has them all."""
    ranks = range(len(shards.spans))
    holders = [shards.holder(rank) for rank in ranks]
    if not any(holder is not None for holder in holders):
        return None
    widths = [end - start for start, end in map(shards.edge, ranks)]
    own = holders[shards.rank]
    edge = _whole(tiles, *shards.edge(shards.rank), like)
    asked = [rank for rank in ranks if holders[rank] == shards.rank]
    received = _sent(
        edge,
        [edge.numel() if rank == own else 0 for rank in ranks],
        [like.shape[0] * widths[rank] if rank in asked else 0 for rank in ranks],
        shards,
    )
    found = [received[rank].view(like.shape[0], -1) for rank in sorted(asked, key=shards.edge)]
    return torch.cat(found, 1) if found else None


def _exchange(records: Tensor, shards: Shards) -> None:
    """Bring the records [N, splits, RECORD] of each rank's splits to all ranks."""
    spans = [shards.splits(rank) for rank in range(len(shards.spans))]
    own = records.new_zeros(max(b - a for a, b in spans), records.shape[0], len(RECORD))
    a, b = spans[shards.rank]
    own[: b - a] = records[:, a:b].transpose(0, 1)
    for (a, b), found in zip(spans, gathered(own, group_of(shards.group)), strict=True):
        records[:, a:b] = found[: b - a].transpose(0, 1)


def dealt(logits: Tensor, shards: Shards) -> Tensor:
    """The whole rows [n, V] that are this rank's, of its entries [N, V_r] of all of them."""
    ranks, (start, end) = range(len(shards.spans)), shards.own
    total = logits.shape[0]
    counts = [b - a for a, b in (shards.rows(total, rank) for rank in ranks)]
    rows = counts[shards.rank]
    received = _sent(
        logits.contiguous(),
        [count * (end - start) for count in counts],
        [rows * (b - a) for a, b in shards.spans],
        shards,
    )
    whole = logits.new_empty(rows, shards.vocab)
    for (a, b), part in zip(shards.spans, received, strict=True):
        whole[:, a:b] = part.view(rows, b - a)
    return whole


def collected(columns: Sequence[Tensor | None], total: int, shards: Shards) -> list[Tensor | None]:
    """Of what each rank has of its rows [n, ...], all rows: of all columns in one gather."""
    if total == 0:
        return list(columns)
    part = -(-total // len(shards.spans))
    flat = [None if x is None else bytes_of(x.reshape(x.shape[0], math.prod(x.shape[1:]))) for x in columns]
    widths = [0 if x is None else x.shape[1] for x in flat]
    own = torch.cat([x for x in flat if x is not None], 1)
    if own.shape[0] < part:
        own = torch.nn.functional.pad(own, (0, 0, 0, part - own.shape[0]))
    every = gathered(own, group_of(shards.group)).flatten(0, 1)[:total].split(widths, 1)
    # in memory of their own: what lies inside of a row has no alignment
    return [
        None
        if x is None
        else found.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(x.dtype)
        .view(total, *x.shape[1:])
        for x, found in zip(columns, every, strict=True)
    ]


def _sent(x: Tensor, counts: list[int], expected: list[int], shards: Shards) -> list[Tensor]:
    """What each rank sends to this one, which sends to each so many elements of ``x``, one behind another."""
    size = x.element_size()
    received = x.new_empty(sum(expected))
    dist.all_to_all_single(
        bytes_of(received),
        bytes_of(x.reshape(-1)),
        [count * size for count in expected],
        [count * size for count in counts],
        group=group_of(shards.group),
    )
    return list(received.split(expected))


def _up(entry: int) -> int:
    """The first split that begins there or behind."""
    return -(-entry // SPLIT) * SPLIT
