"""What the rows of a step are multiplied with: each group's shared blocks once, then everyone's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.integrations.vllm.attention_groups import groups_of


class Member(NamedTuple):
    """One request of a group."""

    rows: tuple[int, int]  # among the plan's rows
    blocks: Tensor  # int64: all of the request's, in order
    context: int  # tokens before its first row
    length: int  # and with its rows


class Part(NamedTuple):
    """Consecutive rows of the plan, and the keys that they are multiplied with."""

    rows: tuple[int, int]
    blocks: Tensor  # int64
    start: int  # position of the first key
    keys: int


class Singles(NamedTuple):
    """Blocks of requests with one row each: of which request, and where in it they stand."""

    rows: Tensor  # int64 [S]: of the plan
    blocks: Tensor  # int64 [N]
    owners: Tensor  # int64 [N]: which of ``rows``
    starts: Tensor  # int64 [N]: position of the block's first key


class Window(NamedTuple):
    """The work of layers whose rows see so many positions."""

    shared: tuple[Part, ...]
    own: tuple[Part, ...]
    singles: Singles
    read: int  # keys of the blocks that are read, of all groups
    apart: int  # keys that would be read if each request read its own


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """The requests of a step that share blocks: made once a step, used by each layer."""

    rows: Tensor  # int64 [R]: rows of the step's queries, member by member, group by group
    positions: Tensor  # int64 [R]
    requests: tuple[int, ...]
    groups: tuple[tuple[int, tuple[Member, ...]], ...]  # shared blocks, and who shares them
    block_size: int
    _windows: dict[int, Window] = field(default_factory=dict, init=False)

    @staticmethod
    def of(
        block_table: Tensor, query_starts: Sequence[int], lengths: Sequence[int], block_size: int
    ) -> SharedPlan | None:
        """The plan of a step, None if no block before their rows is that of two requests.

        Args:
            block_table: [N, B] on the CPU.
            query_starts: N + 1 numbers: request n asks with the rows from the n-th to the next.
            lengths: tokens of each request, its rows included.
        """
        spans = list(zip(query_starts[:-1], query_starts[1:], lengths, strict=True))
        context = [length - (end - first) for first, end, length in spans]
        found = groups_of(block_table, [n // block_size for n in context])
        if not found:
            return None
        groups, rows, positions, at = [], [], [], 0
        for group in found:
            members = []
            for request in group.requests:
                first, end, length = spans[request]
                blocks = block_table[request, : -(-length // block_size)].long()
                members.append(Member((at, at + end - first), blocks, context[request], length))
                rows.append(torch.arange(first, end))
                positions.append(torch.arange(context[request], length))
                at += end - first
            groups.append((group.blocks, tuple(members)))
        requests = tuple(request for group in found for request in group.requests)
        return SharedPlan(torch.cat(rows), torch.cat(positions), requests, tuple(groups), block_size)

    def window(self, size: int) -> Window:
        """The work where a row sees ``size`` positions, itself included; 0: all."""
        if size not in self._windows:
            self._windows[size] = self._window(size)
        return self._windows[size]

    def _window(self, size: int) -> Window:
        shared, own, read, apart = [], [], 0, 0
        rows: list[int] = []
        singles: list[tuple[Tensor, int, int]] = []
        for blocks, members in self.groups:
            # what lies before the window of every member is read by none
            first = min(self._first(member, size) for member in members)
            if first < blocks:
                run = members[0].rows[0], members[-1].rows[1]
                start, end = first * self.block_size, blocks * self.block_size
                shared.append(Part(run, members[0].blocks[first:blocks], start, end - start))
                read += end - start
            for member in members:
                first = max(blocks, self._first(member, size))
                start, (a, b) = first * self.block_size, member.rows
                if b - a == 1:
                    singles.append((member.blocks[first:], len(rows), start))
                    rows.append(a)
                else:
                    own.append(Part(member.rows, member.blocks[first:], start, member.length - start))
                read += (len(member.blocks) - first) * self.block_size
                apart += member.length - (max(0, member.context + 1 - size) if size else 0)
        return Window(tuple(shared), tuple(own), self._singles(rows, singles), read, apart)

    def _first(self, member: Member, size: int) -> int:
        """The first block of which a row of the member sees a key."""
        return max(0, member.context + 1 - size) // self.block_size if size else 0

    def _singles(self, rows: list[int], found: list[tuple[Tensor, int, int]]) -> Singles:
        empty = torch.arange(0)
        blocks = [empty, *(blocks for blocks, _, _ in found)]
        owners = [empty, *(torch.full((len(blocks),), owner) for blocks, owner, _ in found)]
        starts = [empty, *(start + self.block_size * torch.arange(len(blocks)) for blocks, _, start in found)]
        return Singles(
            torch.tensor(rows, dtype=torch.int64), *(torch.cat(x) for x in (blocks, owners, starts))
        )
