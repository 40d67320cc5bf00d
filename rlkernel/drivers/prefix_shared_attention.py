"""Shared attention as a few calls of a kernel that knows sequences only, and which way costs fewer bytes.

``cascade``: each segment by itself, causal, then rows on the keys of segments above them, and a merge.  What
a call of the second kind takes are consecutive rows and consecutive keys: nothing is copied.  ``gather``: one
call, on a copy of every segment's whole path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.prefix.layout import PrefixLayout, Run, joined


class Call(NamedTuple):
    """One call without a causal mask: ``q[rows]`` on ``k[keys]``.

    Between the sequences that it is made for may lie rows and keys of none.  They are sequences of their own,
    of rows without keys or keys without rows; what the kernel says about them is not to be read.
    """

    rows: Run
    keys: Run
    cu_seqlens: tuple[int, int]  # of the tables of Cascade, for rows and for keys alike
    max_rows: int
    max_keys: int
    asked: tuple[Run, ...]  # the rows that have keys, of the whole batch
    answered: tuple[Run, ...]  # the keys that have rows


class Cascade(NamedTuple):
    """The tables of all calls, on one device."""

    own: Tensor  # int32 [S + 1]: every segment by itself
    max_own: int
    cu_rows: Tensor  # int32: cu_seqlens of all calls, one behind the other
    cu_keys: Tensor
    calls: tuple[Call, ...]


def cascade(layout: PrefixLayout, device: torch.device | str = "cpu") -> Cascade:
    """The calls on segments above, with their tables, made once for each device."""
    return layout._on(device, "cascade", lambda: _cascade(layout))


def _cascade(layout: PrefixLayout) -> Cascade:
    cu_rows: list[int] = []
    cu_keys: list[int] = []
    calls = []
    for chain in _chains(layout):
        (first_row, _), (first_key, _) = chain[0]
        rows, keys = [0], [0]
        for (row, row_end), (key, key_end) in chain:
            if row - first_row > rows[-1]:  # rows without keys
                rows.append(row - first_row)
                keys.append(keys[-1])
            if key - first_key > keys[-1]:  # keys without rows
                rows.append(rows[-1])
                keys.append(key - first_key)
            rows.append(row_end - first_row)
            keys.append(key_end - first_key)
        at = len(cu_rows)
        cu_rows += rows
        cu_keys += keys
        calls.append(
            Call(
                (first_row, first_row + rows[-1]),
                (first_key, first_key + keys[-1]),
                (at, len(cu_rows)),
                max(b - a for a, b in zip(rows, rows[1:], strict=False)),
                max(b - a for a, b in zip(keys, keys[1:], strict=False)),
                tuple(joined(run for run, _ in chain)),
                tuple(joined(run for _, run in chain)),
            )
        )
    own, *tables = (
        torch.tensor(x, dtype=torch.int32, device="cpu")
        for x in ([*layout.starts, layout.total], cu_rows, cu_keys)
    )
    return Cascade(own, max(layout.lengths, default=0), tables[0], tables[1], tuple(calls))


def _chains(layout: PrefixLayout) -> list[list[tuple[Run, Run]]]:
    """Pairs (rows, keys of a segment above) in lists that a call can take: both runs only go forward.

    A row is in as many lists as there are segments above it.  Prompts with completions alone make one list.
    """
    pairs = [(run, layout.rows(s)) for s in range(len(layout.lengths)) for run in layout.rows_below(s)]
    chains: list[list[tuple[Run, Run]]] = []
    for rows, keys in sorted(pairs):
        for chain in chains:
            last_rows, last_keys = chain[-1]
            if last_rows[1] <= rows[0] and last_keys[1] <= keys[0]:
                chain.append((rows, keys))
                break
        else:
            chains.append([(rows, keys)])
    return chains


def gathers(layout: PrefixLayout, rule: AttentionRule, heads: int, kv_heads: int) -> bool:
    """Whether ``gather`` is the way: fewer bytes, or what a cascade cannot do.

    A cascade knows no distance between a row and a key of another segment, so it has no window; and it rounds
    differently from a call on the whole sequence, so its bits are not those of one.

    In units of a head's row, with K keys in the paths of all segments that have something above, and R rows
    asked again, once for each segment above them::

        gather    16 * K * Hkv   forward: copy read and written, then read (6); backward: the same, the
                                 gradients written and read to be summed (10)
        cascade   16 * R * Hq    forward: q read, partial written, merge of two into one (5); backward: q, out
                                 and grad_out read, dq written, added and kept in fp32 meanwhile (about 11)

    What both move alike is left out, and roots, which gather copies once, against once for each segment below
    them.  So K * Hkv <= R * Hq; with G completions of L tokens under a prompt of P, K = G * (P + L), R = G *
    L: P <= (Hq / Hkv - 1) * L.  Derived, and not yet measured.
    """
    keys, rows = layout._on("cpu", "shared", lambda: _shared(layout))
    # without sharing nothing is copied, and it is one call
    return bool(rule.window or rule.bitwise or not rows or keys * kv_heads <= rows * heads)


def widened(x: Tensor, width: int) -> Tensor:
    """With zeros behind each row's numbers."""
    return x if x.shape[2] == width else torch.nn.functional.pad(x, (0, width - x.shape[2]))


class _Shared(NamedTuple):
    keys: int  # in the paths of segments with something above
    rows: int  # once for each segment above them


def _shared(layout: PrefixLayout) -> _Shared:
    segments = zip(layout.parents, layout.offsets, layout.lengths, strict=True)
    keys = sum(offset + length for parent, offset, length in segments if parent >= 0)
    return _Shared(keys, sum(b - a for s in range(len(layout.lengths)) for a, b in layout.rows_below(s)))
