"""Which rows of a packed batch attend to which: a forest of segments.

A segment is a run of consecutive tokens that belong together: a prompt, a completion, a shared reasoning
stem.  Its first token follows its parent's last one.  A row sees the rows of its segment up to itself and all
rows of the segments above; two siblings never see each other.

Rows are packed as ``[prompt segments | completion segments]``, each part in depth-first order.  So whatever
stands below a segment is at most two runs of rows, one in each part, which kernels take as views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int]  # rows [first, end)


class RowTables(NamedTuple):
    """Per row of the batch, int32 [T] each.  Row i sees row j, ``window`` W rows back at most, where

    ``first[j] <= first[i] < last[j]`` (i's segment is j's or below it) and ``0 <= pos[i] - pos[j] < W``.
    """

    first: Tensor  # number of the row's segment, depth first
    last: Tensor  # one past the number of the last segment below
    pos: Tensor  # position in the sequence


class Gathered(NamedTuple):
    """The batch as sequences of a varlen kernel: each segment's rows ask, all rows of its path answer.

    The causal mask is aligned at the end (bottom right), as FlashAttention has it.
    """

    keys: Tensor  # int64 [K]: the row of each key
    cu_seqlens_q: Tensor  # int32 [S + 1]
    cu_seqlens_k: Tensor  # int32 [S + 1]
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass
class _Span:
    """Segments found so far: how many, and the range that they lie in."""

    first: int = 0
    end: int = 0
    count: int = 0

    def add(self, first: int, end: int, count: int) -> None:
        self.first = min(self.first, first) if self.count else first
        self.end = max(self.end, end)
        self.count += count


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """Lengths, parents (-1: none) and part (True: completion) of non-empty segments, in the order of rows.

    ``PrefixLayout.of`` takes any forest; this constructor takes only the order described above.

    Examples:
        >>> layout = rlkernel.PrefixLayout((2, 3, 1), (-1, 0, 0), (False, True, True))
        >>> layout.total, layout.offsets
        (6, (0, 2, 2))
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    completion: tuple[bool, ...]

    # plain attributes, which torch.compile can read
    starts: tuple[int, ...] = field(init=False)
    """The first row of each segment."""
    offsets: tuple[int, ...] = field(init=False)
    """The position of each segment's first row: how many rows stand above it."""
    total: int = field(init=False)
    """T, the number of rows."""
    n_prefix: int = field(init=False)
    """The number of rows of prompt segments."""
    max_position: int = field(init=False)
    """The largest position of a row, -1 without one."""
    segments: Tensor = field(init=False, repr=False)
    """int64 [S, 3] on the CPU, (length, parent, is completion): what ``of_tensor`` takes back."""

    def __post_init__(self) -> None:
        self._check()
        offsets: list[int] = []
        for parent in self.parents:
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        *starts, total = accumulate(self.lengths, initial=0)
        columns = [self.lengths, self.parents, [int(c) for c in self.completion]]
        derived = {
            "starts": tuple(starts),
            "offsets": tuple(offsets),
            "total": total,
            "n_prefix": sum(n for n, c in zip(self.lengths, self.completion, strict=True) if not c),
            "max_position": max((o + n for o, n in zip(offsets, self.lengths, strict=True)), default=0) - 1,
            "segments": torch.tensor(columns, dtype=torch.int64, device="cpu").reshape(3, -1).T.contiguous(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        if not len(self.lengths) == len(self.parents) == len(self.completion):
            got = f"{len(self.lengths)}, {len(self.parents)} and {len(self.completion)}"
            raise ValueError(f"lengths, parents and completion must have one value a segment, got {got}")
        for s, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise ValueError(f"lengths[{s}] must be >= 1, got {length}")
            if not -1 <= parent < s:
                raise ValueError(f"parents[{s}] must be -1 or an earlier segment, got {parent}")
            if parent >= 0 and self.completion[parent] and not self.completion[s]:
                raise ValueError(f"completion[{s}] must be True below completion segment {parent}, got False")
        if list(self.completion) != sorted(self.completion):
            raise ValueError("completion must be False for the first segments and True for the rest")
        for s, spans in enumerate(self._below):
            for part, span in enumerate(spans):
                if span.count != span.end - span.first:
                    what = ("prompt", "completion")[part]
                    raise ValueError(f"the {what} segments below segment {s} must be consecutive")

    # the forest

    @cached_property
    def _below(self) -> list[tuple[_Span, _Span]]:
        """The segments below each one, in the prompt part and in the completion part."""
        below = [(_Span(), _Span()) for _ in self.lengths]
        for s in reversed(range(len(below))):  # children before their parents
            parent = self.parents[s]
            if parent >= 0:
                below[parent][self.completion[s]].add(s, s + 1, 1)
                for span, part in zip(below[parent], below[s], strict=True):
                    if part.count:
                        span.add(part.first, part.end, part.count)
        return below

    def rows(self, s: int) -> Run:
        """The rows of segment s."""
        return self.starts[s], self.starts[s] + self.lengths[s]

    def path(self, s: int) -> list[int]:
        """The segments above s from the root down, and s itself."""
        return path_of(self.parents, s)

    def rows_below(self, s: int) -> list[Run]:
        """The rows of all segments below s: no run, one or two, none of them empty."""
        below = (span for span in self._below[s] if span.count)
        return joined((self.starts[span.first], self.rows(span.end - 1)[1]) for span in below)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The segments with nothing below."""
        inner = set(self.parents)
        return tuple(s for s in range(len(self.lengths)) if s not in inner)

    @cached_property
    def is_flat(self) -> bool:
        """Whether no segment has a parent that has one: prompts and completions, two levels at most."""
        return all(p < 0 or self.parents[p] < 0 for p in self.parents)

    # tables

    @staticmethod
    def of_tensor(segments: Tensor) -> PrefixLayout:
        """The layout whose ``segments`` these are, with the tables that it made before."""
        return _known(tuple(map(tuple, segments.tolist())))

    def as_tensor(self) -> Tensor:
        """``segments``, as which a layout crosses into a graph."""
        return self.segments

    @cached_property
    def numbers(self) -> tuple[tuple[int, int], ...]:
        """(number, one past the number of the last segment below) of each segment, counted depth first."""
        segments = range(len(self.lengths))
        sizes = [1 for _ in segments]  # with all segments below
        for s in reversed(segments):
            if self.parents[s] >= 0:
                sizes[self.parents[s]] += sizes[s]
        first = {s: i for i, s in enumerate(_depth_first(self.parents, segments))}
        return tuple((first[s], first[s] + sizes[s]) for s in segments)

    def row_tables(self, device: torch.device | str = "cpu") -> RowTables:
        """The tables of who sees whom, made once for each device."""
        return self._on(device, "rows", self._row_tables)

    def _row_tables(self) -> RowTables:
        first, last = zip(*self.numbers, strict=True) if self.numbers else ((), ())
        shift = [o - r for o, r in zip(self.offsets, self.starts, strict=True)]
        per_segment = torch.tensor([first, last, shift], dtype=torch.int32, device="cpu")
        per_row = per_segment.repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.int64, device="cpu"), 1
        )
        position = per_row[2] + torch.arange(self.total, dtype=torch.int32, device="cpu")
        # memory of its own for each: Triton compiles anew where an address is no multiple of 16 bytes
        return RowTables(per_row[0].clone(), per_row[1].clone(), position)

    def gathered(self, device: torch.device | str = "cpu") -> Gathered:
        """Keys gathered so that one varlen call does all, made once for each device."""
        return self._on(device, "gathered", self._gathered)

    def _gathered(self) -> Gathered:
        paths = [[self.rows(a) for a in self.path(s)] for s in range(len(self.lengths))]
        keys = [o + n for o, n in zip(self.offsets, self.lengths, strict=True)]
        return Gathered(
            ranges([run for path in paths for run in path]),
            torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device="cpu"),
            torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device="cpu"),
            max(self.lengths, default=0),
            max(keys, default=0),
        )

    def _on(self, device: torch.device | str, name: str, make: Callable[[], Any]) -> Any:
        """What ``make()`` gives, with its tensors on the device; made once."""
        key = (name, str(device))
        if key not in self._tables:
            host = self._tables.setdefault((name, "cpu"), make())
            self._tables[key] = type(host)(*(t.to(device) if isinstance(t, Tensor) else t for t in host))
        return self._tables[key]

    @cached_property
    def _tables(self) -> dict[tuple[str, str], Any]:
        return {}

    # without sharing

    def repeated(self) -> tuple[PrefixLayout, Tensor]:
        """The same sequences, each with a copy of all that it shares, and the row of each of their tokens.

        ``x[index]`` are the inputs of the ordinary, dense attention; a leaf is a sequence.
        """
        paths = [self.path(leaf) for leaf in self.leaves]
        lengths = tuple(sum(self.lengths[s] for s in path) for path in paths)
        n = len(lengths)
        index = ranges([self.rows(s) for path in paths for s in path])
        return PrefixLayout(lengths, (-1,) * n, (True,) * n), index

    @staticmethod
    def of(
        lengths: Sequence[int], parents: Sequence[int], completion: Sequence[bool]
    ) -> tuple[PrefixLayout, list[int]]:
        """The layout of any forest whose parents come before their children, and where each segment went.

        Empty segments drop out (-1), their children move up.  Siblings keep their order.
        """
        kept_parent: list[int] = []
        for s, parent in enumerate(parents):
            if not -1 <= parent < s:
                raise ValueError(f"parents[{s}] must be -1 or an earlier segment, got {parent}")
            kept_parent.append(parent if parent < 0 or lengths[parent] else kept_parent[parent])
        order = _depth_first(kept_parent, [s for s, length in enumerate(lengths) if length])
        order = [s for s in order if not completion[s]] + [s for s in order if completion[s]]
        place = {s: i for i, s in enumerate(order)} | {-1: -1}
        layout = PrefixLayout(
            tuple(int(lengths[s]) for s in order),
            tuple(place[kept_parent[s]] for s in order),
            tuple(bool(completion[s]) for s in order),
        )
        return layout, [place.get(s, -1) for s in range(len(lengths))]


def _depth_first(parents: Sequence[int], nodes: Iterable[int]) -> list[int]:
    """The nodes, each followed by all that is below it; siblings keep their order."""
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(parents[node], []).append(node)
    order, stack = [], children.get(-1, [])[::-1]
    while stack:
        order.append(stack.pop())
        stack += reversed(children.get(order[-1], ()))
    return order


def path_of(parents: Sequence[int], node: int) -> list[int]:
    """The nodes above a node from the root down, and the node itself; no node of -1."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def joined(runs: Iterable[Run]) -> list[Run]:
    """The runs in their order, those that overlap or lie side by side as one; empty ones are left out."""
    found: list[Run] = []
    for first, end in sorted(run for run in runs if run[0] < run[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


def ranges(runs: Sequence[Run]) -> Tensor:
    """The numbers of all runs, one after another: int64."""
    if len(runs) < 8:  # the few of a small batch, in fewer calls
        return torch.cat(
            [torch.arange(0, device="cpu"), *(torch.arange(first, end, device="cpu") for first, end in runs)]
        )
    first, end = torch.tensor(runs, dtype=torch.int64, device="cpu").unbind(1)
    lengths = end - first
    shift = first - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum()), device="cpu") + shift.repeat_interleave(lengths)


@functools.lru_cache(maxsize=16)
def _known(segments: tuple[tuple[int, ...], ...]) -> PrefixLayout:
    lengths, parents, completion = zip(*segments, strict=True) if segments else ((), (), ())
    return PrefixLayout(lengths, parents, tuple(map(bool, completion)))
