"""What ``paged_prefix_attention`` means, in plain PyTorch, each request alone; in fp64 it is the truth."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedCall, PagedResults, PagedRule

TILE = 1024  # rows of a tile of scores


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return []


def forward(call: PagedCall) -> PagedResults:
    query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, _, rule, sinks = call
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    lse = torch.empty(query.shape[1], query.shape[0], dtype=dtype, device=query.device)
    starts, size = cu_seqlens_q.tolist(), key_cache.shape[1]
    for n, length in enumerate(seq_lens.tolist()):
        first, end = starts[n : n + 2]
        if first == end:
            continue
        context = length - (end - first)
        # what is in front of the first row's window may not be there
        low = max(0, context + 1 - rule.window) if rule.window else 0
        keys = torch.arange(low, length, device=query.device)
        blocks = block_table[n, keys // size].long()
        k, v = (x[blocks, keys % size].to(dtype) for x in (key_cache, value_cache))
        for a in range(first, end, TILE):
            b = min(a + TILE, end)
            scores = _scores(query[a:b].to(dtype), k, context + a - first, low, rule)
            top = scores.amax(2)
            if sinks is not None:
                top = torch.maximum(top, sinks.to(dtype)[:, None])
            weights = torch.exp(scores - top[..., None])
            total = weights.sum(2)
            if sinks is not None:
                total = total + torch.exp(sinks.to(dtype)[:, None] - top)
            p = (weights / total[..., None]).unflatten(0, (k.shape[1], -1)).flatten(1, 2)
            found = (p @ v.transpose(0, 1)).view(query.shape[1], b - a, -1)
            out[a:b] = found.transpose(0, 1).to(query.dtype)
            lse[:, a:b] = top + total.log()
    return PagedResults(out, lse)


def _scores(q: Tensor, k: Tensor, at: int, low: int, rule: PagedRule) -> Tensor:
    """[Hq, n, m] of rows at positions ``at``... and keys at ``low``..., -inf where one is not seen."""
    n, heads, d = q.shape
    grouped = q.transpose(0, 1).reshape(k.shape[1], -1, d)
    scores = (grouped @ k.permute(1, 2, 0)).view(heads, n, -1) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    back = torch.arange(at, at + n, device=q.device)[:, None] - torch.arange(
        low, low + len(k), device=q.device
    )
    seen = back >= 0
    if rule.window:
        seen &= back < rule.window
    return scores.masked_fill(~seen, -math.inf)


def make_inputs(
    prompt: int,
    groups: int = 2,
    samples: int = 4,
    own: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_dim: int | None = None,
    *,
    queries: int = 1,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``rlkernel.paged_prefix_attention``: groups of samples behind shared prompts.

    The blocks stand anywhere in the cache; places that no key was written to hold NaN.
    """
    g = torch.Generator().manual_seed(seed)
    tables: list[list[int]] = []
    count = 0
    for _ in range(groups):
        whole = prompt // block_size
        shared = list(range(count, count + whole))
        count += whole
        for _ in range(samples):
            more = -(-(prompt + own) // block_size) - whole
            tables.append([*shared, *range(count, count + more)])
            count += more
    place = torch.randperm(count + 1, generator=g, dtype=torch.int64, device="cpu").to(torch.int32)
    width = max(map(len, tables))
    table = place[torch.tensor([[*t, *[count] * (width - len(t))] for t in tables], device="cpu")]
    lens = [prompt + own] * len(tables)

    def cache(d: int) -> Tensor:
        x = torch.randn(count + 1, block_size, kv_heads, d, generator=g, dtype=torch.float32, device="cpu")
        written = torch.zeros(count + 1, block_size, dtype=torch.bool, device="cpu")
        for row, length in zip(table.tolist(), lens, strict=True):
            for i, block in enumerate(row[: -(-length // block_size)]):
                written[block, : max(0, length - i * block_size)] = True
        return x.masked_fill(~written[:, :, None, None], math.nan).to(dtype).to(device)

    rows = queries * len(tables)
    return {
        "query": torch.randn(rows, heads, head_dim, generator=g, dtype=torch.float32, device="cpu")
        .to(dtype)
        .to(device),
        "key_cache": cache(head_dim),
        "value_cache": cache(v_dim or head_dim),
        "block_table": table.to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.arange(0, rows + 1, queries, dtype=torch.int32, device=device),
    }
