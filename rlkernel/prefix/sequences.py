"""The forest of what whole sequences share: a radix tree, cut where what is predicted begins or ends."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.prefix.layout import path_of, ranges
from rlkernel.prefix.tree import Tree, listed, on_host, tokens_of


def tree_of(token_ids: Sequence[Any], loss_mask: Sequence[Any]) -> Tree:
    """The tree whose sample n is sequence n, of which the tokens under its mask are predicted."""
    sequences = [tokens_of(f"token_ids[{n}]", ids) for n, ids in enumerate(listed("token_ids", token_ids))]
    loss_mask = listed("loss_mask", loss_mask)
    if len(loss_mask) != len(sequences):
        raise ValueError(
            f"loss_mask must have a mask for each of the {len(sequences)} sequences, got {len(loss_mask)}"
        )
    masks = [_mask_of(n, mask, len(sequences[n])) for n, mask in enumerate(loss_mask)]
    return _Radix(sequences).tree(masks)


def _mask_of(n: int, mask: Any, length: int) -> Tensor:
    found = on_host(f"loss_mask[{n}]", "booleans or numbers", mask)
    if tuple(found.shape) != (length,):
        got = tuple(found.shape)
        raise ValueError(f"loss_mask[{n}] must have token_ids[{n}]'s shape ({length},), got {got}")
    return found != 0


class _Radix:
    """Nodes are runs of ``tokens``; no two children of a node begin with the same token."""

    def __init__(self, sequences: list[Tensor]) -> None:
        self.tokens = torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *sequences])
        self.first: list[int] = []
        self.end: list[int] = []
        self.parent: list[int] = []
        self.children: list[dict[int, int]] = []
        self.roots: dict[int, int] = {}
        at = 0
        self.ends = []
        for sequence in sequences:
            self.ends.append(self._insert(at, at + len(sequence)))
            at += len(sequence)

    def _insert(self, at: int, end: int) -> int:
        """The node at whose end the sequence ``tokens[at:end]`` ends."""
        parent, children = -1, self.roots
        if at == end:
            return self._add(at, end, parent)
        while at < end:
            token = int(self.tokens[at])
            node = children.get(token)
            if node is None:
                node = children[token] = self._add(at, end, parent)
                at = end
            else:
                same = self._same(self.first[node], at, min(self.end[node] - self.first[node], end - at))
                if same < self.end[node] - self.first[node]:
                    node = children[token] = self._cut(node, same)
                at += same
            parent, children = node, self.children[node]
        return parent

    def _add(self, first: int, end: int, parent: int) -> int:
        self.first.append(first)
        self.end.append(end)
        self.parent.append(parent)
        self.children.append({})
        return len(self.first) - 1

    def _same(self, a: int, b: int, length: int) -> int:
        """How many tokens from a on are those from b on."""
        other = (self.tokens[a : a + length] != self.tokens[b : b + length]).to(torch.uint8)
        return int(other.argmax()) if bool(other.any()) else length

    def _cut(self, node: int, length: int) -> int:
        """A new node of the first tokens of ``node``, which keeps the others, and its number, below it."""
        middle = self.first[node] + length
        upper = self._add(self.first[node], middle, self.parent[node])
        self.children[upper] = {int(self.tokens[middle]): node}
        self.first[node], self.parent[node] = middle, upper
        return upper

    def tree(self, masks: list[Tensor]) -> Tree:
        order, depth = self._order()
        paths = [path_of(self.parent, end) for end in self.ends]
        cuts: list[set[int]] = [set() for _ in self.first]
        for path, mask in zip(paths, masks, strict=True):
            starts = [depth[node] for node in path]
            for t in ((mask[1:] != mask[:-1]).nonzero()[:, 0] + 1).tolist():
                k = bisect.bisect_right(starts, t) - 1
                if t > starts[k]:
                    cuts[path[k]].add(t - starts[k])
        runs: list[tuple[int, int]] = []  # of tokens, those of a node one after another
        parents: list[int] = []
        places: list[list[tuple[int, int]]] = [[] for _ in self.first]  # (run, its position in the sequence)
        for node in order:
            parent = self.parent[node]
            above = places[parent][-1][0] if parent >= 0 else -1
            edges = [0, *sorted(cuts[node]), self.end[node] - self.first[node]]
            for a, b in zip(edges[:-1], edges[1:], strict=True):
                places[node].append((len(runs), depth[node] + a))
                runs.append((self.first[node] + a, self.first[node] + b))
                parents.append(above)
                above = len(runs) - 1
        labelled = []
        for path, mask in zip(paths, masks, strict=True):
            parts = [place for node in path for place in places[node]] if len(mask) else []
            wanted = mask[torch.tensor([at for _, at in parts], dtype=torch.int64, device="cpu")].tolist()
            labelled.append(
                tuple(run for (run, _), is_wanted in zip(parts, wanted, strict=True) if is_wanted)
            )
        predicted = {run for own in labelled for run in own}
        completion: list[bool] = []
        for run, parent in enumerate(parents):
            completion.append(run in predicted or (parent >= 0 and completion[parent]))
        return Tree(
            self.tokens[ranges(runs)],
            tuple(end - first for first, end in runs),
            tuple(parents),
            tuple(completion),
            tuple(places[end][-1][0] for end in self.ends),
            tuple(labelled),
        )

    def _order(self) -> tuple[list[int], list[int]]:
        """The nodes, what is below each one right behind it, and how many tokens are above each."""
        depth = [0] * len(self.first)
        order, stack = [], [node for node, parent in enumerate(self.parent) if parent < 0][::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            below = depth[node] + self.end[node] - self.first[node]
            for child in self.children[node].values():
                depth[child] = below
            stack += reversed(self.children[node].values())
        return order, depth
