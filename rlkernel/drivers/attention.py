"""``attention`` over any backend's ``paged_prefix_attention``: the rows of a packed batch as a paged cache.

Each row of k and v is a block of one key; a segment of the layout is a request, its table the rows of its
path.  So a prompt that is shared is read once, and every row has the bits that an engine's step gives it.
"""

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
    table = torch.zeros(len(lens), max(lens, default=0), dtype=torch.int32)
    for s, length in enumerate(lens):
        table[s, :length] = ranges([layout.rows(a) for a in layout.path(s)])
    starts = [*layout.starts, layout.total]
    plan = paged.plan_of(table, lens, starts, 1, window)
    seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32) for x in (lens, starts))
    return Requests(table, seq_lens, cu_seqlens_q, plan)
