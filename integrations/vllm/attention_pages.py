"""Attention of rows on a paged KV cache, in which each group reads the blocks that it shares once.

A row's softmax is continued from chunk to chunk of its keys: first those that its group shares, multiplied
with the rows of all members at once, then its own.  A chunk is copied out of its pages, and is in the
processor's cache while it is used; each page is read once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.integrations.vllm.attention_plan import Part, SharedPlan, Singles

CHUNK = 1 << 19  # numbers of a chunk of keys, of one of values, and of a tile of scores


class Pages:
    """A layer's cache as vLLM's vector kernels keep it on a CPU, dense.

    Of each block and head first the keys, [head dim, tokens], then the values, [tokens, head dim].
    """

    def __init__(self, kv_cache: Tensor) -> None:
        """``kv_cache``: [blocks, Hkv, tokens of a block, 2 * head dim]."""
        self.cache = kv_cache
        _, self.heads, self.size, both = kv_cache.shape
        self.head_dim = both // 2

    @property
    def chunk(self) -> int:
        """How many blocks make a chunk."""
        return max(1, CHUNK // (self.heads * self.size * self.head_dim))

    @property
    def token_bytes(self) -> int:
        """Of a key and its value, all heads."""
        return 2 * self.heads * self.head_dim * self.cache.element_size()

    def joined(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [Hkv, D, M] and values [Hkv, M, D] of blocks that follow each other."""
        # rows of a flat tensor: torch copies those many times faster than it gathers from strided ones
        halves = 2 * (blocks * self.heads + torch.arange(self.heads)[:, None])  # [Hkv, n]
        lines = halves[:, None] * self.head_dim + torch.arange(self.head_dim)[:, None]  # [Hkv, D, n]
        k = self.cache.view(-1, self.size).index_select(0, lines.flatten())
        v = self.cache.view(-1, self.size * self.head_dim).index_select(0, halves.flatten() + 1)
        return (
            k.view(self.heads, self.head_dim, -1).float(),
            v.view(self.heads, -1, self.head_dim).float(),
        )

    def apart(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, Hkv, D, tokens] and values [n, Hkv, tokens, D]."""
        found = self.cache.flatten(1).index_select(0, blocks).float()
        k, v = found.view(len(blocks), self.heads, 2, -1).unbind(2)
        return k.unflatten(2, (self.head_dim, self.size)), v.unflatten(2, (self.size, self.head_dim))


class Softmax(NamedTuple):
    """What rows have seen so far; the last dimensions are rows, or rows and head dim."""

    top: Tensor
    total: Tensor  # of exp(score - top)
    sums: Tensor  # of exp(score - top) * value

    @staticmethod
    def empty(shape: tuple[int, ...], head_dim: int) -> Softmax:
        return Softmax(torch.full(shape, -math.inf), torch.zeros(shape), torch.zeros(*shape, head_dim))


def attend(
    q: Tensor, pages: Pages, plan: SharedPlan, rule: AttentionRule, sinks: Tensor | None = None
) -> Tensor:
    """The output [R, Hq, D], fp32, of the plan's rows of q [T, Hq, D]."""
    work, kv_heads = plan.window(rule.window), pages.heads
    x = (q[plan.rows].float() * rule.scale).unflatten(1, (kv_heads, -1))  # [R, Hkv, r, D]
    state = Softmax.empty(tuple(x.shape[:3]), x.shape[3])
    for part in (*work.shared, *work.own):
        rows = slice(*part.rows)
        seen = _seen(part, x[rows], Softmax(*(y[rows] for y in state)), pages, plan.positions[rows], rule)
        for y, z in zip(state, seen, strict=True):
            y[rows] = z
    if len(work.singles.rows):
        _singles(work.singles, x, state, pages, plan.positions[work.singles.rows], rule)
    top, total, sums = state
    if sinks is not None:
        sink = sinks.float().view(kv_heads, -1)
        both = torch.maximum(top, sink)
        total = total * torch.exp(top - both) + torch.exp(sink - both)
        sums = sums * torch.exp(top - both)[..., None]
    return (sums / total[..., None]).flatten(1, 2)


def _seen(
    part: Part, x: Tensor, state: Softmax, pages: Pages, positions: Tensor, rule: AttentionRule
) -> Softmax:
    """The state [n, Hkv, r] after the part's keys."""
    n, _, r, _ = x.shape
    # heads first: a head's rows, of all members, are one matrix
    x, top, total, sums = (y.transpose(0, 1).flatten(1, 2).clone() for y in (x, *state))
    for a in range(0, len(part.blocks), pages.chunk):
        blocks = part.blocks[a : a + pages.chunk]
        keys = min(len(blocks) * pages.size, part.keys - a * pages.size)  # what lies behind may be anything
        k, v = pages.joined(blocks)
        k, v = k[..., :keys], v[:, :keys]
        at = part.start + a * pages.size + torch.arange(keys)
        tile = max(1, CHUNK // (len(x) * keys * r))
        for i in range(0, n, tile):
            rows, where = slice(i * r, min(i + tile, n) * r), positions[i : i + tile]
            score = _score(x[:, rows] @ k, rule)
            if not _all_seen(where, at, rule):
                hidden = ~_visible(where, at, rule)
                score.unflatten(1, (-1, r)).masked_fill_(hidden[:, None], -math.inf)
            before = top[:, rows]
            now = torch.maximum(before, score.amax(2))
            base = torch.where(now == -math.inf, 0.0, now)
            shrink = torch.exp(before - base)
            weight = score.sub_(base[..., None]).exp_()
            total[:, rows] = total[:, rows] * shrink + weight.sum(2)
            sums[:, rows] = sums[:, rows] * shrink[..., None] + weight @ v
            top[:, rows] = now
    top, total, sums = (y.unflatten(1, (n, r)).transpose(0, 1) for y in (top, total, sums))
    return Softmax(top, total, sums)


def _singles(
    singles: Singles, x: Tensor, state: Softmax, pages: Pages, positions: Tensor, rule: AttentionRule
) -> None:
    """Continue, in place, the rows of requests that have one each: a small product for each block."""
    x = x[singles.rows]
    top, total, sums = (y[singles.rows] for y in state)
    for a in range(0, len(singles.blocks), pages.chunk):
        blocks, owners, starts = (y[a : a + pages.chunk] for y in singles[1:])
        k, v = pages.apart(blocks)
        at = starts[:, None] + torch.arange(pages.size)
        visible = _visible(positions[owners], at, rule)
        partly = (~visible.all(1)).nonzero()[:, 0]
        score = _score(x[owners] @ k, rule)
        hidden = ~visible[partly]
        score[partly] = score[partly].masked_fill(hidden[:, None, None], -math.inf)
        v[partly] = v[partly].masked_fill(hidden[:, None, :, None], 0.0)  # may be anything, NaN too
        here = score.amax(3)
        now = top.scatter_reduce(0, owners[:, None, None].expand_as(here), here, "amax")
        base = torch.where(now == -math.inf, 0.0, now)
        shrink = torch.exp(top - base)
        weight = score.sub_(base[owners][..., None]).exp_()
        total = (total * shrink).index_add_(0, owners, weight.sum(3))
        sums = (sums * shrink[..., None]).index_add_(0, owners, weight @ v)
        top = now
    for y, z in zip(state, (top, total, sums), strict=True):
        y[singles.rows] = z


def _score(score: Tensor, rule: AttentionRule) -> Tensor:
    return score.div_(rule.softcap).tanh_().mul_(rule.softcap) if rule.softcap else score


def _visible(rows: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
    """Whether the row at a position sees the keys at others: [n] and [m] or [n, m] -> [n, m]."""
    back = rows[:, None] - keys
    return (back >= 0) & (back < rule.window) if rule.window else back >= 0


def _all_seen(rows: Tensor, keys: Tensor, rule: AttentionRule) -> bool:
    low, high = rows.aminmax()
    return bool(low >= keys[-1]) and not (rule.window and bool(high - keys[0] >= rule.window))
