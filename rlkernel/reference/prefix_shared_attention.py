"""What ``prefix_shared_attention`` means, in plain PyTorch; in fp64 it is the truth for other backends."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    Forest,
    OutGrads,
)
from rlkernel.reference import unsupported as unsupported

# Rows of a tile. Tiles are cut at positions in the sequence, and are always full: so a row takes part in the
# same products whether its prompt is shared or not, and has the same bits.
TILE = 64


def forward(call: AttentionCall) -> AttentionResults:
    q, k, v, layout, rule, sinks, _ = call
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
    for path, rows in _paths(layout, q.device):
        n, skip = len(path), len(path) - len(rows)
        qs, ks, vs = (_padded(x[path].to(dtype)) for x in (q, k, v))
        for a in range(skip // TILE * TILE, n, TILE):
            b = a + TILE
            scores, _ = _scores(qs[a:b], ks[:b], a, rule)
            if sinks is not None:
                sink = sinks.to(dtype)[:, None, None].expand(-1, TILE, 1)
                scores = torch.cat([scores, sink], 2)
            norm = scores.logsumexp(2)  # [Hq, TILE]
            p = torch.exp(scores - norm[..., None])[..., :b]
            own = slice(max(a, skip) - a, min(b, n) - a)
            to = path[a:b][own]
            out[to] = _from_keys(p, vs[:b])[own].to(q.dtype)
            lse[:, to] = norm[:, own]
    return AttentionResults(out, lse)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    """Those of k and v are summed wide."""
    q, k, v, layout, rule, *_ = call
    (out, lse), (grad_out,) = results, grads
    dtype = lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(2).T  # [Hq, T]
    for path, rows in _paths(layout, q.device):
        ks, vs = (x[path].to(dtype) for x in (k, v))
        dks, dvs = torch.zeros_like(ks), torch.zeros_like(vs)
        for at in range(len(path) - len(rows), len(path), TILE):
            to = path[at : at + TILE]
            seen = at + len(to)
            scores, slope = _scores(q[to].to(dtype), ks[:seen], at, rule)
            p = torch.exp(scores - lse[:, to, None])
            grad = grad_out[to].to(dtype)
            dp = _per_key(grad, vs[:seen])
            ds = p * (dp - delta[:, to, None]) * slope * rule.scale
            dq[to] = _from_keys(ds, ks[:seen])
            dks[:seen] += _to_keys(ds, q[to].to(dtype), ks.shape[1])
            dvs[:seen] += _to_keys(p, grad, vs.shape[1])
        dk[path] += dks
        dv[path] += dvs
    return AttentionGrads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _paths(layout: Forest, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each segment the rows that it sees, from the root down to its own, and its own."""
    paths: list[Tensor] = []
    numbers = torch.arange(sum(layout.lengths), device=device)
    for rows, parent in zip(numbers.split(layout.lengths), layout.parents, strict=True):
        paths.append(torch.cat([paths[parent], rows]) if parent >= 0 else rows)
        yield paths[-1], rows


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % TILE))


def _scores(q: Tensor, k: Tensor, at: int, rule: AttentionRule) -> tuple[Tensor, Tensor | float]:
    """[Hq, n, m] of rows at positions ``at``..., -inf where a key is not seen, and the softcap's slope."""
    scores = _per_key(q, k) * rule.scale
    slope: Tensor | float = 1.0
    if rule.softcap:
        capped = torch.tanh(scores / rule.softcap)
        scores, slope = rule.softcap * capped, 1 - capped.square()
    back = torch.arange(at, at + len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    seen = back >= 0
    if rule.window:
        seen &= back < rule.window
    return scores.masked_fill(~seen, -math.inf), slope


def _per_key(x: Tensor, k: Tensor) -> Tensor:
    """[n, Hq, D] with [m, Hkv, D] -> [Hq, n, m]."""
    n, heads, d = x.shape
    kv_heads = k.shape[1]
    grouped = x.transpose(0, 1).reshape(kv_heads, heads // kv_heads * n, d)
    return (grouped @ k.permute(1, 2, 0)).view(heads, n, -1)


def _from_keys(p: Tensor, v: Tensor) -> Tensor:
    """[Hq, n, m] with [m, Hkv, D] -> [n, Hq, D]."""
    heads, n, m = p.shape
    kv_heads = v.shape[1]
    return (p.reshape(kv_heads, -1, m) @ v.transpose(0, 1)).view(heads, n, -1).transpose(0, 1)


def _to_keys(p: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """[Hq, n, m] with [n, Hq, D] -> [m, Hkv, D], summed over the rows and the heads of a group."""
    _, _, m = p.shape
    grouped = x.transpose(0, 1).reshape(kv_heads, -1, x.shape[2])
    return (p.reshape(kv_heads, -1, m).transpose(1, 2) @ grouped).transpose(0, 1)


def make_inputs(
    layout: Forest,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``rlkernel.prefix_shared_attention``: normal q, k, and v of head dim ``v_dim``."""
    g, total = torch.Generator(device).manual_seed(seed), sum(layout.lengths)

    def normal(h: int, d: int) -> Tensor:
        return torch.randn(total, h, d, generator=g, dtype=torch.float32, device=device).to(dtype)

    q, k = normal(heads, head_dim), normal(kv_heads, head_dim)
    return {"q": q, "k": k, "v": normal(kv_heads, v_dim or head_dim), "batch": layout}
