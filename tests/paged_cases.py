"""Steps of an engine on a paged cache for tests of ``paged_prefix_attention``, and the truth about them."""

import itertools
import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import rlkernel

OP = "paged_prefix_attention"
TABLES = ("block_table", "seq_lens", "cu_seqlens_q")


class Request(NamedTuple):
    """``path``: names of what its keys begin with, and their lengths; then keys of its own."""

    path: tuple[tuple[str, int], ...]
    own: int
    rows: int = 1


def group(name: str, keys: int, own: list[int], rows: list[int] | None = None) -> list[Request]:
    return [Request(((name, keys),), n, r) for n, r in zip(own, rows or [1] * len(own), strict=True)]


# keys of a prompt that are a few tiles, that end in the middle of one, of a block, of a chunk and behind it
STEPS = {
    "one row alone": [Request((), 1)],
    "a row without a group": [Request((), 700)],
    "decode of one group": group("a", 192, [3, 9, 1]),
    "decode of several": [*group("a", 600, [30, 77, 1]), *group("b", 100, [64, 8])],
    "groups in each other's midst": [
        x for pair in zip(group("a", 130, [5, 6, 70]), group("b", 70, [1, 2, 3]), strict=True) for x in pair
    ],
    "a system prompt, prompts, samples": [
        Request((("s", 128), (f"p{i // 2}", 448)), 10 + i) for i in range(4)
    ],
    "deep in one chunk": [Request((("s", 64), ("t", 64), ("u", 64))[: 1 + i], 70 + i) for i in range(3)],
    "prefill of requests alone": [Request((), 150, 150), Request((), 3, 3)],
    "prefill behind a cached prompt": group("a", 256, [70, 12, 5], [70, 12, 5]),
    "chunked prefill": [Request((), 1100, 90)],
    "both at once": [
        *group("a", 320, [1, 20, 5], [1, 6, 1]),
        *group("b", 64, [13, 2], [13, 1]),
        Request((), 0, 0),
    ],
    "many rows of a group": group("a", 128, [7] * 70),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0, "scale": 0.5},
    "window": {"window": 75},
    "window of one": {"window": 1},
    "window beyond": {"window": 5000},
    "sinks": {"sinks": True},
}


def make(
    requests: list[Request],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    v_dim: int | None = None,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The op's arguments.  What is not to be read is NaN in the caches, and no block in the table."""
    g = torch.Generator().manual_seed(seed)
    blocks = itertools.count()
    tables, lens = [], []
    known: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for path, own, _ in requests:
        table: list[int] = []
        for i in range(len(path)):
            whole = sum(keys for _, keys in path[: i + 1]) // block_size
            key = path[: i + 1]
            known.setdefault(key, [next(blocks) for _ in range(whole - len(table))])
            table = table + known[key]
        lens.append(sum(keys for _, keys in path) + own)
        table = table + [next(blocks) for _ in range(-(-lens[-1] // block_size) - len(table))]
        tables.append(table)
    count = next(blocks) + 3
    place = list(range(count))
    random.Random(seed).shuffle(place)  # neighbours in a sequence are not neighbours in the cache
    nowhere = 2**31 - 1
    width = max(map(len, tables)) + 1
    table_of = torch.full((len(tables), width), nowhere, dtype=torch.int32)
    written = torch.zeros(count, block_size, dtype=torch.bool)
    for n, (table, length, request) in enumerate(zip(tables, lens, requests, strict=True)):
        if not request.rows:
            continue
        first = max(0, length - request.rows + 1 - window) if window else 0
        for j in range(first, length):
            block = place[table[j // block_size]]
            table_of[n, j // block_size] = block
            written[block, j % block_size] = True

    def cache(d: int) -> Tensor:
        x = torch.randn(count, block_size, kv_heads, d, generator=g)
        return x.masked_fill(~written[:, :, None, None], math.nan).to(dtype).to(device)

    rows = [request.rows for request in requests]
    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    return {
        "query": torch.randn(sum(rows), heads, head_dim, generator=g).to(dtype).to(device),
        "key_cache": cache(head_dim),
        "value_cache": cache(v_dim or head_dim),
        "block_table": table_of.to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "cu_seqlens_q": starts.to(device),
    }


def options_of(name: str, heads: int = 4, device: str = "cpu") -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, heads).to(device)
    return options


def dense(
    inputs: dict[str, Any],
    dtype: torch.dtype,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each request alone over keys that are gathered and repeated for each head: (out, lse) in ``dtype``."""
    query, starts, lens = (
        inputs["query"].to(dtype),
        *(inputs[n].tolist() for n in ("cu_seqlens_q", "seq_lens")),
    )
    heads, size = query.shape[1], inputs["key_cache"].shape[1]
    out = query.new_empty(*query.shape[:2], inputs["value_cache"].shape[3])
    lse = query.new_empty(heads, len(query))
    for n, (a, b, length) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if a == b:
            continue
        low = max(0, length - (b - a) + 1 - window) if window else 0  # in front of it there may be no blocks
        keys = torch.arange(low, length, device=query.device)
        blocks = inputs["block_table"][n, keys // size].long()
        k, v = (
            inputs[name][blocks, keys % size]
            .to(dtype)
            .transpose(0, 1)
            .repeat_interleave(heads // inputs[name].shape[2], 0)
            for name in ("key_cache", "value_cache")
        )
        q = query[a:b].transpose(0, 1)
        back = torch.arange(length - (b - a), length, device=keys.device)[:, None] - keys
        seen = (back >= 0) & (back < (window or length + 1))
        score = (q * (scale or query.shape[2] ** -0.5)) @ k.transpose(1, 2)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score = score.masked_fill(~seen, -math.inf)
        if sinks is not None:
            score = torch.cat([score, sinks.to(dtype)[:, None, None].expand(-1, b - a, 1)], 2)
        lse[:, a:b] = score.logsumexp(2)
        if softcap or sinks is not None:
            found = score.softmax(2)[..., : len(keys)] @ v
        else:
            found = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=scale)[0]
        out[a:b] = found.transpose(0, 1)
    return out, lse


def like_vllm(inputs: dict[str, Any]) -> dict[str, Any]:
    """The caches as vLLM has them on a CPU: of each block and head keys [D, tokens], then values."""
    k, v = inputs["key_cache"], inputs["value_cache"]
    n, size, heads, d = k.shape
    cache = torch.cat([k.permute(0, 2, 3, 1).flatten(2), v.transpose(1, 2).flatten(2)], 2)
    keys, values = cache.split([d * size, v.shape[3] * size], 2)
    return {
        **inputs,
        "key_cache": keys.unflatten(2, (d, size)).permute(0, 3, 1, 2),
        "value_cache": values.unflatten(2, (size, -1)).transpose(1, 2),
    }


def like_flash(inputs: dict[str, Any]) -> dict[str, Any]:
    """The caches as vLLM has them on a GPU: keys and values of a block in one tensor."""
    both = torch.stack([inputs["key_cache"], inputs["value_cache"]], 1)
    return {**inputs, "key_cache": both[:, 0], "value_cache": both[:, 1]}


def heads_first(inputs: dict[str, Any]) -> dict[str, Any]:
    """[blocks, Hkv, block_size, D] in memory."""
    names = ("key_cache", "value_cache")
    return {**inputs, **{name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names}}


LAYOUTS = {"vllm": like_vllm, "flash": like_flash, "heads first": heads_first}


def run(backend: str, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    with rlkernel.use_backend(backend):
        out, lse = rlkernel.paged_prefix_attention(**inputs, **options, return_lse=True)
    return out, lse


def alone(inputs: dict[str, Any], n: int) -> tuple[dict[str, Any], slice]:
    """The n-th request of a step by itself, and its rows."""
    first, end = inputs["cu_seqlens_q"][n : n + 2].tolist()
    starts = torch.tensor([0, end - first], dtype=torch.int32, device=inputs["query"].device)
    own = {name: inputs[name][n : n + 1] for name in TABLES[:2]}
    return {**inputs, **own, "query": inputs["query"][first:end], "cu_seqlens_q": starts}, slice(first, end)


def differing(backend: str, inputs: dict[str, Any], **options: Any) -> list[int]:
    """Requests whose bits are others alone than in their step."""
    out, lse = run(backend, inputs, **options)
    found = []
    for n in range(len(inputs["seq_lens"])):
        one, rows = alone(inputs, n)
        if rows.start == rows.stop:
            continue
        mine, its = run(backend, one, **options)
        if not (torch.equal(mine, out[rows]) and torch.equal(its, lse[:, rows])):
            found.append(n)
    return found


def in_blocks_of(size: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same step on caches of other blocks, in which no request shares one."""
    lens, old = inputs["seq_lens"].tolist(), inputs["key_cache"].shape[1]
    counts = [-(-length // size) for length in lens]
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    caches = {
        name: inputs[name].new_full((sum(counts), size, *inputs[name].shape[2:]), math.nan)
        for name in ("key_cache", "value_cache")
    }
    for n, (length, count) in enumerate(zip(lens, counts, strict=True)):
        first, keys = sum(counts[:n]), torch.arange(length)
        table[n, :count] = torch.arange(first, first + count)
        blocks = inputs["block_table"][n, keys // old].long()
        for name, cache in caches.items():
            cache[first + keys // size, keys % size] = inputs[name][blocks, keys % old]
    return {**inputs, **caches, "block_table": table.to(inputs["block_table"].device)}
