"""``attention`` over any backend's ``paged_prefix_attention``: the rows of a packed batch as a paged cache.

Each row of k and v is a block of one key; a segment of the layout is a request, its table the rows of its
path.  So a prompt that is shared is read once, and every row has the bits that an engine's step gives it.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedCall, PagedPlan, PagedRule
from rlkernel.calls.prefix_shared_attention import AttentionCall
from rlkernel.prefix import paged
from rlkernel.prefix.layout import PrefixLayout, ranges


class Requests(NamedTuple):
    """See PagedCall."""

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    plan: PagedPlan


class Asked(NamedTuple):
    """The same requests as backward reads them, those that share keys one behind the other: int64."""

    rows: Tensor  # [R, 2]: where the rows of each begin and end
    key_offsets: Tensor  # [R + 1], of keys
    keys: Tensor  # [P]: the row of k and v at each position of a request
    group_offsets: Tensor  # [G + 1], of requests: those of different groups share no key


def paged_call(call: AttentionCall) -> PagedCall:
    q, k, v, layout, rule, sinks, _ = call
    requests = requests_of(layout, rule.window, q.device)
    return PagedCall(
        q, k[:, None], v[:, None], *requests, PagedRule(rule.scale, rule.softcap, rule.window), sinks
    )


def requests_of(layout: PrefixLayout, window: int, device: torch.device) -> Requests:
    """The segments as requests, made once for each window and device."""
    host = layout._on("cpu", f"requests {window}", lambda: _requests(layout, window))
    if device.type == "cpu":
        return host
    tables = layout._on(device, "tables", lambda: host._replace(plan=None))
    key = f"requests {window}", str(device)
    if key not in layout._tables:
        layout._tables[key] = tables._replace(plan=paged.on(host.plan, device))
    return layout._tables[key]


def _requests(layout: PrefixLayout, window: int) -> Requests:
    lens = [offset + n for offset, n in zip(layout.offsets, layout.lengths, strict=True)]
    table = torch.zeros(len(lens), max(lens, default=0), dtype=torch.int32, device="cpu")
    for s, length in enumerate(lens):
        table[s, :length] = ranges([layout.rows(a) for a in layout.path(s)])
    starts = [*layout.starts, layout.total]
    plan = paged.plan_of(table, lens, starts, 1, window)
    seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in (lens, starts))
    return Requests(table, seq_lens, cu_seqlens_q, plan)


def asked_of(layout: PrefixLayout) -> Asked:
    """The segments as requests, those of a tree being a group; on the CPU."""
    return layout._on("cpu", "asked", lambda: _asked(layout))


def _asked(layout: PrefixLayout) -> Asked:
    trees: dict[int, list[int]] = {}
    for s in range(len(layout.lengths)):
        trees.setdefault(layout.path(s)[0], []).append(s)
    order = [s for tree in trees.values() for s in tree]
    rows = [layout.rows(s) for s in order]
    keys = [ranges([layout.rows(a) for a in layout.path(s)]) for s in order]
    return asked(rows, keys, [len(tree) for tree in trees.values()])


def asked(rows: Sequence[tuple[int, int]], keys: Sequence[Tensor], group_sizes: Sequence[int]) -> Asked:
    return Asked(
        torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 2),
        _offsets([len(x) for x in keys]),
        torch.cat([x.long() for x in keys]) if keys else torch.empty(0, dtype=torch.int64, device="cpu"),
        _offsets(group_sizes),
    )


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64, device="cpu")
