"""``scaled_dot_product_attention`` over ``paged_prefix_attention``, where each row's keys are an interval.

A causal mask, the padding of a batch on either side, packed sequences and windows are such masks: each row
sees keys lo to hi, and those that follow each other with one lo and rising hi are a request, whose positions
count from lo.  So a row has the same bits with and without padding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedCall, PagedRule
from rlkernel.consistency.aten_call import Refused, module_of, need_floats
from rlkernel.drivers.attention import Requests
from rlkernel.prefix import paged


class _Run(NamedTuple):
    """Consecutive rows of the batch, and the keys of the last of them."""

    first: int
    end: int
    lo: int
    hi: int


def flash_attention_for_cpu(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """[B, H, T, D] and its lse [B, H, T], as torch's kernel gives it to its backward pass."""
    need_floats(query, key, value)
    if dropout_p:
        raise Refused("dropout draws by a row's place")
    count, heads, rows, _ = query.shape
    keys = key.shape[2]
    lo, hi = _intervals(query, keys, is_causal, attn_mask)
    requests = _requests(_bytes(lo), _bytes(hi), rows, keys)
    flat = query.transpose(1, 2).flatten(0, 1)
    k, v = (x.transpose(1, 2).flatten(0, 1)[:, None] for x in (key, value))
    module = module_of("paged_prefix_attention", flat, k, v)
    rule = PagedRule(query.shape[3] ** -0.5 if scale is None else scale, 0.0, 0)
    flat = flat if flat.stride(2) == 1 else flat.contiguous()
    out, lse = module.forward(PagedCall(flat, k, v, *requests, rule, None))
    blind = (lo > hi).flatten()
    if blind.any():  # rows of padding: torch gives 0
        out = out.masked_fill(blind[:, None, None], 0)
        lse = lse.masked_fill(blind, 0)
    out = out.unflatten(0, (count, rows)).transpose(1, 2)
    return out, lse.unflatten(1, (count, rows)).transpose(0, 1)


def _intervals(query: Tensor, keys: int, is_causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first and the last key that each row [B, T] sees; the first behind the last: none."""
    count, _, rows, _ = query.shape
    if mask is None:
        hi = torch.arange(rows) if is_causal else torch.full((rows,), keys - 1)
        return torch.zeros(count, rows, dtype=torch.int64), hi.clamp(max=keys - 1).expand(count, rows)
    seen = _seen(mask)
    if seen.shape[-3] > 1 and not bool((seen == seen[..., :1, :, :]).all()):
        raise Refused("its mask must be the same for all heads")
    seen = seen[..., 0, :, :].expand(count, rows, keys)
    if is_causal:
        seen = seen & torch.ones(rows, keys, dtype=torch.bool).tril()
    number = seen.sum(2)
    lo = seen.int().argmax(2)
    hi = keys - 1 - seen.flip(2).int().argmax(2)
    none = number == 0
    if not bool(((hi - lo + 1 == number) | none).all()):
        raise Refused("each row of its mask must show keys that follow each other")
    return lo.masked_fill(none, 0), hi.masked_fill(none, -1)


def _seen(mask: Tensor) -> Tensor:
    mask = mask.cpu().reshape((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool(((mask == 0) | hidden).all()):
        raise Refused("its mask must hide keys, and not weigh them")
    return ~hidden


def _bytes(x: Tensor) -> bytes:
    return x.to(torch.int32).contiguous().numpy().tobytes()


@functools.lru_cache(maxsize=16)
def _requests(lo: bytes, hi: bytes, rows: int, keys: int) -> Requests:
    """Of rows [B, T] and keys [B, Tk] that lie one behind the other; the layers of a model share it."""
    first, last = (torch.frombuffer(bytearray(x), dtype=torch.int32).long() for x in (lo, hi))
    place = torch.arange(len(first))
    begins = torch.ones(len(first), dtype=torch.bool)
    begins[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1] + 1) | (place[1:] % rows == 0)
    starts = begins.nonzero()[:, 0].tolist()
    ends = [*starts[1:], len(first)]
    tables, lens, rows_of = [], [], [0]
    for a, b in zip(starts, ends, strict=True):
        base, low, high = a // rows * keys, int(first[a]), int(last[b - 1])
        seen = max(high + 1 - low, 0)
        # a row that sees nothing is given a key, and its result thrown away
        tables.append(torch.arange(base + low, base + low + max(seen, b - a), dtype=torch.int32))
        lens.append(len(tables[-1]))
        rows_of.append(b)
    table = torch.zeros(len(tables), max(lens, default=0), dtype=torch.int32)
    for s, x in enumerate(tables):
        table[s, : len(x)] = x
    plan = paged.plan_of(table, lens, rows_of, 1, 0)
    seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32) for x in (lens, rows_of))
    return Requests(table, seq_lens, cu_seqlens_q, plan)


def _refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise Refused("use rlkernel.attention: this kernel splits its sums by the batch")


SERVED = {
    "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
    "_scaled_dot_product_flash_attention": _refuse,
    "_scaled_dot_product_efficient_attention": _refuse,
    "_scaled_dot_product_cudnn_attention": _refuse,
}
