"""Which samples of a forest run together: parts of bounded size, or one part for each of several ranks.

Samples that share a prefix are kept together as long as they fit; where they do not, the tree is cut as low
as it can be, and only what stands above the cut is computed once in each part.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from rlkernel.prefix_tree import Tree


class _Piece(NamedTuple):
    """Samples that stay together, and what their nodes cost, each shared one once."""

    samples: list[int]
    cost: float


def parts(tree: Tree, limit: int) -> list[list[int]]:
    """The samples in as few parts of at most ``limit`` rows as best fit finds; one sample may be larger.

    Rows are counted as tokens: a root's last one too, which has no row of its own.
    """
    pieces = _fit(_pieces(tree, tree.lengths, limit), limit)
    return sorted(sorted(piece.samples) for piece in pieces) or [[]]


def balanced(tree: Tree, ranks: int, pair_cost: float) -> list[list[int]]:
    """The samples of each rank, with nearly equal costs; what costs more than a rank's share is cut.

    A row costs 1, and ``pair_cost`` for each row that it sees.
    """
    above = _sums_above(tree, tree.lengths)
    costs = [n + pair_cost * n * (over + (n + 1) / 2) for n, over in zip(tree.lengths, above, strict=True)]
    pieces = _pieces(tree, costs, sum(costs) / ranks)
    loads = [(0.0, rank) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.samples)):
        load, rank = heapq.heappop(loads)
        found[rank] += piece.samples
        heapq.heappush(loads, (load + piece.cost, rank))
    return [sorted(samples) for samples in found]


def _pieces(tree: Tree, costs: Sequence[float], limit: float) -> list[_Piece]:
    """The trees of the forest, those that cost more than the limit cut into pieces that do not.

    From the leaves up: what stands below a node is one piece if it fits together with all that is above it.
    """
    above = _sums_above(tree, costs)
    below: list[list[_Piece]] = [[] for _ in costs]
    ending: list[list[int]] = [[] for _ in costs]
    for sample, end in enumerate(tree.ends):
        ending[end].append(sample)
    roots: list[_Piece] = []
    for i in reversed(range(len(costs))):
        pieces = below[i]
        if ending[i]:
            pieces.append(_Piece(ending[i], 0))
        below[i] = []
        room = limit - above[i] - costs[i]
        to = roots if tree.parents[i] < 0 else below[tree.parents[i]]
        to.extend(_Piece(piece.samples, piece.cost + costs[i]) for piece in _fit(pieces, room))
    return roots


def _fit(pieces: list[_Piece], room: float) -> list[_Piece]:
    """Pieces joined up to ``room``: all of them if they fit, else by best fit, largest first."""
    total = sum(piece.cost for piece in pieces)
    if len(pieces) < 2 or total <= room:
        return [_Piece([n for piece in pieces for n in piece.samples], total)] if pieces else []
    bins: list[_Piece] = []
    rooms: list[tuple[float, int]] = []  # what is left in each bin, sorted
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.samples)):
        place = bisect.bisect_left(rooms, (piece.cost, -1))
        if place == len(rooms):
            bisect.insort(rooms, (room - piece.cost, len(bins)))
            bins.append(_Piece(list(piece.samples), piece.cost))
            continue
        left, k = rooms.pop(place)
        bisect.insort(rooms, (left - piece.cost, k))
        bins[k].samples.extend(piece.samples)
        bins[k] = _Piece(bins[k].samples, bins[k].cost + piece.cost)
    return bins


def _sums_above(tree: Tree, values: Sequence[float]) -> list[float]:
    """For each node the sum over the nodes above it."""
    found: list[float] = []
    for parent in tree.parents:
        found.append(found[parent] + values[parent] if parent >= 0 else 0)
    return found
