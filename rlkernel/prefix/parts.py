"""Which samples of a forest run together: parts of bounded size, or one part for each of several ranks.

Samples that share a prefix are kept together as long as they fit; where they do not, the tree is cut as low
as it can be, and only what stands above the cut is computed once in each part.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from rlkernel.prefix.tree import Tree


class _Piece(NamedTuple):
    """Samples that stay together, and what their nodes cost, each shared one once."""

    samples: list[int]
    cost: float


def parts(tree: Tree, limit: int) -> list[list[int]]:
    """The samples in as few parts of at most ``limit`` rows as best fit finds; one sample may be larger.

    Rows are counted as tokens: a root's last one too, which has no row of its own.
    """
    pieces = _fit(_pieces(tree, _needed(tree)[0], tree.lengths, limit), limit)
    return sorted(sorted(piece.samples) for piece in pieces) or [[]]


def balanced(tree: Tree, ranks: int, pair_cost: float) -> list[list[int]]:
    """The samples of each rank, with nearly equal costs; what costs more than a rank's share is cut.

    A row costs 1, and ``pair_cost`` for each row that it sees.
    """
    above = _sums_above(tree, tree.lengths)
    costs = [n + pair_cost * n * (over + (n + 1) / 2) for n, over in zip(tree.lengths, above, strict=True)]
    ends, needed = _needed(tree)
    pieces = _pieces(tree, ends, costs, sum(costs[i] for i in needed) / ranks)
    loads = [(0.0, rank) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.samples)):
        load, rank = heapq.heappop(loads)
        found[rank] += piece.samples
        heapq.heappush(loads, (load + piece.cost, rank))
    return [sorted(samples) for samples in found]


def _needed(tree: Tree) -> tuple[list[int], set[int]]:
    """Where each sample's last label is, and the nodes that any label needs: no other has rows.

    A sample without a label is at the root that it shares with others, at -1 where these have none either.
    """
    ends: list[int] = []
    for n in range(len(tree.ends)):
        own = [i for i in tree.predicted(n) if tree.lengths[i]]
        ends.append(own[-1] if own else -1)
    needed = tree.ancestry(ends)
    for n, end in enumerate(ends):
        if end < 0 and (root := tree.path(n)[0]) in needed:
            ends[n] = root
    return ends, needed


def _pieces(tree: Tree, ends: Sequence[int], costs: Sequence[float], limit: float) -> list[_Piece]:
    """The trees of the forest, those that cost more than the limit cut into pieces that do not.

    From the leaves up: what stands below a node is one piece if it fits together with all that is above it.
    """
    above = _sums_above(tree, costs)
    below: list[list[_Piece]] = [[] for _ in costs]
    ending: list[list[int]] = [[] for _ in costs]
    free: list[int] = []  # of cost
    for sample, end in enumerate(ends):
        (ending[end] if end >= 0 else free).append(sample)
    roots = [_Piece(free, 0)] if free else []
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
    """Pieces joined up to ``room``: all of them if they fit, else by best fit, largest first.

    What costs nothing joins others in any case: its rows are among theirs.
    """
    total = sum(piece.cost for piece in pieces)
    if len(pieces) < 2 or total <= room:
        return [_Piece([n for piece in pieces for n in piece.samples], total)] if pieces else []
    bins: list[_Piece] = []
    rooms: list[tuple[float, int]] = []  # what is left in each bin, sorted
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.samples)):
        place = bisect.bisect_left(rooms, (piece.cost, -1))
        if not piece.cost and bins:
            place = min(place, len(rooms) - 1)
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
