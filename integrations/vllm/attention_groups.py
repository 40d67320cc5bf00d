"""Which requests of a step begin with the same blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Requests whose first ``blocks`` blocks are the same ones."""

    requests: tuple[int, ...]
    blocks: int


class _Node(NamedTuple):
    """Requests, next to each other in the order of their blocks, that share ``depth`` blocks and no more."""

    depth: int
    first: int
    saved: int  # by the groups inside of it, in blocks
    groups: list[tuple[int, int, int]]  # (first, end, depth)


def groups_of(block_table: Tensor, usable: Sequence[int]) -> list[Group]:
    """The groups that leave the fewest blocks to read when each group reads what it shares once.

    Args:
        block_table: [N, B] on the CPU: the blocks of each request, in the order of its tokens.
        usable: how many of these may be shared, for each request: those that end before its first query.

    A request is in one group at most.  Of a tree, such as a system prompt with many prompts behind it, the
    levels are taken that save most: of two that follow each other, one.
    """
    count, width = block_table.shape
    if count < 2:
        return []
    # What a request may not share is its own: no other has that number.
    own = torch.arange(-1, -count - 1, -1)[:, None]
    shown = torch.arange(width) < torch.tensor(list(usable))[:, None]
    table = torch.where(shown, block_table.long(), own)
    rows = torch.cat([table, own], 1)
    order = sorted(range(count), key=rows.tolist().__getitem__)
    rows = rows[order]
    alike = (rows[1:] != rows[:-1]).int().argmax(1).tolist()
    return [Group(tuple(sorted(order[first:end])), depth) for first, end, depth in _best(alike)]


def _best(alike: list[int]) -> list[tuple[int, int, int]]:
    """Of sorted sequences, with how many blocks neighbours have alike: (first, end, depth) of each group."""
    found: list[tuple[int, int, int]] = []
    open_: list[_Node] = []
    for i, depth in enumerate([*alike, 0]):
        node = _Node(0, i, 0, [])
        while open_ and open_[-1].depth > depth:
            node = _closed(_joined(open_.pop(), node), i + 1)
        if open_ and open_[-1].depth == depth:
            open_.append(_joined(open_.pop(), node))
        elif depth:
            open_.append(node._replace(depth=depth))
        else:
            found += node.groups
    return found


def _joined(node: _Node, part: _Node) -> _Node:
    return node._replace(saved=node.saved + part.saved, groups=node.groups + part.groups)


def _closed(node: _Node, end: int) -> _Node:
    together = (end - node.first - 1) * node.depth
    if together < node.saved:
        return node
    return node._replace(saved=together, groups=[(node.first, end, node.depth)])
