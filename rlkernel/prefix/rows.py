"""The rows of a packed batch, from its forest of tokens: the token in each, and the one that it predicts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from rlkernel.prefix.layout import PrefixLayout, Run, ranges
from rlkernel.prefix.tree import Tree


@dataclass(frozen=True, eq=False)
class Rows:
    """Of nodes that have any: rows, tokens and labels as runs, in the order of the rows."""

    layout: PrefixLayout
    nodes: dict[int, Run]  # the rows of each node
    tokens: Tensor  # int64 [T]: the place in ``tree.tokens`` of each row's token
    labels: Tensor  # int64 [M]: of what the rows with a label predict
    label_runs: dict[int, Run]  # which of the labels are each node's
    label_rows: Tensor | None  # int64 [M]: the rows with a label, None where they are all from n_prefix on


def rows_of(tree: Tree) -> Rows:
    """The last token of what is shared stands in front of every continuation, not at its own end."""
    first = tree.starts
    predicted = {i for n in range(len(tree.ends)) for i in tree.predicted(n) if tree.lengths[i]}
    # Whatever no label depends on is left out: prompts without completions, what follows the last label.
    kept = tree.ancestry(list(predicted))
    before: list[int] = []  # where the token in front of each node stands, -1 without one
    runs: list[list[Run]] = []
    labels: list[Run] = []
    for i, (length, parent) in enumerate(zip(tree.lengths, tree.parents, strict=True)):
        ahead = -1
        if parent >= 0:
            ahead = first[parent + 1] - 1 if tree.lengths[parent] else before[parent]
        before.append(ahead)
        body = [(ahead, ahead + 1)] if ahead >= 0 else []
        body.append((first[i], first[i + 1] - 1))
        runs.append([run for run in body if run[0] < run[1]] if length and i in kept else [])
        labels.append((first[i] + (ahead < 0), first[i + 1]))
    layout, nodes = _segments(tree, [sum(end - a for a, end in body) for body in runs])
    labelled = [i for i in nodes if i in predicted]
    ends = [*itertools.accumulate(nodes[i][1] - nodes[i][0] for i in labelled)]
    label_rows = None
    if sum(ends[-1:]) != layout.total - layout.n_prefix:
        label_rows = ranges([nodes[i] for i in labelled])
    return Rows(
        layout,
        nodes,
        ranges([run for i in nodes for run in runs[i]]),
        ranges([labels[i] for i in labelled]),
        dict(zip(labelled, zip([0, *ends], ends, strict=False), strict=True)),
        label_rows,
    )


def _segments(tree: Tree, rows: list[int]) -> tuple[PrefixLayout, dict[int, Run]]:
    """The layout, whose segments are nodes, or several that follow each other alone; and each node's rows."""
    above: list[int] = []  # the next node up that has rows
    only = [0] * len(rows)  # how many nodes with rows have this one above
    for i, parent in enumerate(tree.parents):
        above.append(parent if parent < 0 or rows[parent] else above[parent])
        if rows[i] and above[i] >= 0:
            only[above[i]] += 1
    segment: dict[int, int] = {-1: -1}
    lengths: list[int] = []
    parents: list[int] = []
    completion: list[bool] = []
    place: list[tuple[int, int]] = []  # segment, and how many of its rows are in front of the node's
    for i, n in enumerate(rows):
        if not n:
            place.append((-1, 0))
            continue
        up = above[i]
        if up >= 0 and only[up] == 1 and tree.completion[up] == tree.completion[i]:
            segment[i] = segment[up]
        else:
            segment[i] = len(lengths)
            lengths.append(0)
            parents.append(segment[up])
            completion.append(tree.completion[i])
        place.append((segment[i], lengths[segment[i]]))
        lengths[segment[i]] += n
    layout, went = PrefixLayout.of(lengths, parents, completion)
    starts = [(layout.starts[went[s]] + at, i) for i, (s, at) in enumerate(place) if s >= 0]
    return layout, {i: (start, start + rows[i]) for start, i in sorted(starts)}
