"""Dense attention that torch's CPU flash kernels lack: a softcap, values of another head dim than the keys'.

Products over tiles of rows, whose scores stay in the cache: about as fast as the flash kernels on tensors
that are padded to one head dim, without their memory.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import AttentionRule

SCORES = 1 << 18  # of a tile: they stay in the cache, and memory does not grow with the number of rows


class Dense(NamedTuple):
    """Rows on keys, all of the same lengths; the r heads of k and v are one.  Every row sees a key."""

    q: Tensor  # [B, r, N, D]
    k: Tensor  # [B, r, M, D]
    v: Tensor  # [B, r, M, Dv]
    mask: Tensor | bool  # added to the scores; True: row i sees the first i + 1 keys; False: all
    rule: AttentionRule


def forward(dense: Dense) -> tuple[Tensor, Tensor]:
    """The output [B, r, N, Dv] and its lse [B, r, N]."""
    q, k, v, mask, rule = dense
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = k[:, 0].to(dtype), v[:, 0].to(dtype)
    out = torch.empty(*q.shape[:3], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    for a, b, m in _tiles(q, k, mask):
        x = q[:, :, a:b].to(dtype).flatten(1, 2)
        p, _ = _scores(x, k[:, :m], mask, a, b, rule)
        top = p.amax(2, keepdim=True)
        p.sub_(top).exp_()
        total = p.sum(2, keepdim=True)
        out[:, :, a:b] = (p @ v[:, :m]).div_(total).unflatten(1, (-1, b - a))
        lse[:, :, a:b] = top.add_(total.log_()).view(*q.shape[:2], b - a)
    return out, lse


def backward(dense: Dense, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [B, r, N, D], and of k [B, M, D] and v [B, M, Dv]: all in lse's precision."""
    q, k, v, mask, rule = dense
    k, v = k[:, 0], v[:, 0]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    for a, b, m in _tiles(q, k, mask):
        x, g, o = (y[:, :, a:b].flatten(1, 2) for y in (q, grad, out))
        p, slope = _scores(x, k[:, :m], mask, a, b, rule)
        p.sub_(lse[:, :, a:b].flatten(1, 2)[..., None]).exp_()
        dv[:, :m].baddbmm_(p.transpose(1, 2), g)
        delta = torch.linalg.vecdot(g, o)[..., None]
        ds = (g @ v[:, :m].transpose(1, 2)).sub_(delta).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        dq[:, :, a:b] = (ds @ k[:, :m]).mul_(rule.scale).unflatten(1, (-1, b - a))
        dk[:, :m].baddbmm_(ds.transpose(1, 2), x, alpha=rule.scale)
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, mask: Tensor | bool) -> list[tuple[int, int, int]]:
    """(first row, end, keys that they see)"""
    batch, r, n, _ = q.shape
    m = k.shape[1]
    size = max(SCORES // (batch * r * m), 16)
    ends = [(a, min(a + size, n)) for a in range(0, n, size)]
    return [(a, b, b if mask is True else m) for a, b in ends]


def _scores(
    x: Tensor, k: Tensor, mask: Tensor | bool, a: int, b: int, rule: AttentionRule
) -> tuple[Tensor, Tensor | None]:
    """[B, r * n, m] of rows [a, b), and the softcap's slope."""
    scores, slope = (x * (rule.scale / (rule.softcap or 1.0))) @ k.transpose(1, 2), None
    if rule.softcap:
        scores.tanh_()
        slope = 1 - scores.square()
        scores.mul_(rule.softcap)
    by_row = scores.unflatten(1, (-1, b - a))
    if isinstance(mask, Tensor):
        by_row.add_(mask[a:b])
    elif mask:  # the first a keys are seen by all rows of the tile
        later = torch.ones(b - a, b - a, dtype=torch.bool, device="cpu").triu_(1)
        by_row[..., a:].masked_fill_(later, -math.inf)
    return scores, slope
