"""``paged_prefix_attention`` over FlashInfer: a cascade of its paged prefill calls.

The items of a plan make segments, rows and the keys that they read together: one segment of each row ends
with the row's own keys and is causal, the others lie in front of all of their rows.  Segments whose rows do
not overlap make a level, which is one call; the levels' results are merged by their lse, as FlashInfer's own
cascade does.  The plan is read once for the layers of a step, which pass the same one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import TILE, PagedCall, PagedPlan, PagedResults, PagedRule
from rlkernel.flashinfer._attention import HEAD_DIMS, WORKSPACE, library, natural, tensor_reasons


def unsupported(
    query: Tensor,
    *tensors: Tensor,
    rule: PagedRule | None = None,
    plan: PagedPlan | None = None,
    **options: Any,
) -> list[str]:
    reasons = tensor_reasons("query", query)
    if len(tensors) > 1 and query.is_floating_point():
        key_cache, value_cache, *_ = tensors
        dims = key_cache.shape[3], value_cache.shape[3]
        if dims[0] not in HEAD_DIMS or dims[0] != dims[1]:
            want = f"{', '.join(map(str, HEAD_DIMS))}, the same for keys and values"
            reasons.append(f"the head dim must be one of {want}, got {dims[0]} and {dims[1]}")
        for name, x in (("key_cache", key_cache), ("value_cache", value_cache)):
            if x.stride(3) != 1:
                reasons.append(f"{name} must be dense in the last dimension, got strides {x.stride()}")
    if rule is not None and rule.window:
        reasons.append(f"window must be None: its cascades have none, got {rule.window}")
    if plan is not None and TILE % plan.block_size:
        reasons.append(f"the block size must divide {TILE}, got {plan.block_size}")
    if not reasons:  # an import takes seconds and sets up CUDA
        _, missing = library()
        reasons += [missing] if missing else []
    return reasons


def forward(call: PagedCall) -> PagedResults:
    query, key_cache, value_cache, _, _, _, plan, rule, sinks = call
    rows, heads, _ = query.shape
    if not rows:
        out = query.new_empty(0, heads, value_cache.shape[3])
        return PagedResults(out, query.new_empty(heads, 0, dtype=torch.float32))
    found, _ = library()
    assert found is not None
    shape = _Shape(rule, heads, key_cache.shape[2], query.shape[2], query.dtype)
    caches = key_cache, value_cache
    wrappers = _wrappers(query.device, torch.cuda.current_stream(query.device).cuda_stream)
    (every, wrapper), *others = wrappers.planned(plan, shape)
    # the default of every version: base 2, [T, Hq]
    part, part_lse2 = wrapper.run(query[every], caches, return_lse=True)
    out, lse2 = torch.empty_like(part), torch.empty_like(part_lse2)
    out[every], lse2[every] = part, part_lse2
    for index, wrapper in others:
        state = wrapper.run(query[index], caches, return_lse=True)
        out[index], lse2[index] = found.merge_state(out[index], lse2[index], *state)
    return PagedResults(*natural(out, lse2, sinks))


class Segment(NamedTuple):
    """Plan rows, and the keys that they read together: those of whole pages, but for the last."""

    first: int
    end: int
    page: int  # among the plan's
    position: int
    keys: int
    causal: bool  # it ends with the key of its last row

    def goes_on_with(self, other: Segment) -> bool:
        """Whether the other's rows follow and read the same keys; of one request, each one more."""
        alike = self.page == other.page and self.position == other.position and self.causal == other.causal
        more = other.end - other.first if self.causal else 0
        return alike and self.end == other.first and self.keys + more == other.keys


class Level(NamedTuple):
    """One call of FlashInfer: its tables, on the host."""

    rows: Tensor  # int64: of the query
    q_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_keys: Tensor  # of the last page
    causal: bool


def levels(plan: PagedPlan) -> list[Level]:
    """What FlashInfer is called with: all rows with their own keys, then the levels of what is shared."""
    plan = plan._replace(**{n: getattr(plan, n).cpu() for n in ("rows", "positions", "pages", "items")})
    every = segments(plan)
    own = [segment for segment in every if segment.causal]
    shared: list[list[Segment]] = []
    for segment in every:
        if segment.causal:
            continue
        level = next((level for level in shared if level[-1].end <= segment.first), None)
        if level is None:
            shared.append(level := [])
        level.append(segment)
    return [_level(plan, level) for level in (own, *shared)]


def segments(plan: PagedPlan) -> list[Segment]:
    """The plan's items by their rows, joined where they continue each other, in keys and in rows."""
    positions = plan.positions.tolist()
    of_rows: dict[tuple[int, int], list[Segment]] = {}
    for first, end, page, position, keys, *_ in sorted(plan.items.tolist(), key=lambda item: item[3]):
        run = of_rows.setdefault((first, end), [])
        if run:
            last = run[-1]
            pages = (position - last.position) // plan.block_size
            if last.position + last.keys == position and page - last.page == pages:
                first, end, page, position, keys = *last[:4], last.keys + keys
                run.pop()
        run.append(Segment(first, end, page, position, keys, position + keys == positions[end - 1] + 1))
    found: list[Segment] = []
    for segment in sorted(itertools.chain(*of_rows.values()), key=lambda s: (s.page, s.position, s.first)):
        if found and found[-1].goes_on_with(segment):
            segment = segment._replace(first=found.pop().first)
        found.append(segment)
    return sorted(found)


def _level(plan: PagedPlan, found: list[Segment]) -> Level:
    pages = [slice(s.page, s.page - (-s.keys // plan.block_size)) for s in found]
    return Level(
        torch.cat([plan.rows[s.first : s.end] for s in found]).long(),
        _starts(s.end - s.first for s in found),
        _starts(at.stop - at.start for at in pages),
        torch.cat([plan.pages[at] for at in pages]),
        torch.tensor([(s.keys - 1) % plan.block_size + 1 for s in found], dtype=torch.int32, device="cpu"),
        found[0].causal,
    )


def _starts(counts: Iterable[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cpu")


class _Shape(NamedTuple):
    rule: PagedRule
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class _Wrappers:
    """FlashInfer's wrappers of a stream, one a level, and what they were planned for last."""

    def __init__(self, device: torch.device) -> None:
        # the levels run one behind the other, and may use the same floats
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.every: list[Any] = []
        self.items: weakref.ref[Tensor] | None = None
        self.shape: _Shape | None = None
        self.levels: list[tuple[Tensor, Any]] = []

    def planned(self, plan: PagedPlan, shape: _Shape) -> list[tuple[Tensor, Any]]:
        """Of each level the rows of the query, and the wrapper."""
        if self.shape == shape and self.items is not None and self.items() is plan.items:
            return self.levels
        found, _ = library()
        assert found is not None
        self.levels, self.shape = [], None
        for i, level in enumerate(levels(plan)):
            if i == len(self.every):
                self.every.append(found.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD"))
            self.every[i].plan(
                level.q_starts, level.page_starts, level.pages, level.last_keys,
                shape.heads, shape.kv_heads, shape.head_dim, plan.block_size, causal=level.causal,
                sm_scale=shape.rule.scale, logits_soft_cap=shape.rule.softcap or None,
                q_data_type=shape.dtype, kv_data_type=shape.dtype,
            )  # fmt: skip
            self.levels.append((level.rows.to(self.workspace.device), self.every[i]))
        self.items, self.shape = weakref.ref(plan.items), shape
        return self.levels


@functools.cache
def _wrappers(device: torch.device, stream: int) -> _Wrappers:
    return _Wrappers(device)  # its workspace belongs to one stream
