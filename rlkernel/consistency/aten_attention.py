"""``scaled_dot_product_attention`` over ``paged_prefix_attention``, where each row's keys are an interval.

A causal mask, the padding of a batch on either side, packed sequences and windows are such masks: each row
sees keys lo to hi, and those that follow each other with one lo and rising hi are a request, whose positions
count from lo.  So a row has the same bits with and without padding.  Behind a window's length lo rises with
hi: the rows belong to the same request, and their positions count from where it begins.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.attention import AttentionResults
from rlkernel.calls.paged_prefix_attention import PagedCall, PagedRule
from rlkernel.consistency.aten_call import Refused, Short, module_of, need_floats, used
from rlkernel.consistency.aten_rows import summed
from rlkernel.drivers.attention import Asked, Requests, asked
from rlkernel.prefix import paged
from rlkernel.runtime import invariance


class _Run(NamedTuple):
    """Consecutive rows of the batch, the first key of the first and the last key of the last of them."""

    first: int
    end: int
    lo: int
    hi: int


class _Shown(NamedTuple):
    """The keys of each row: of ``intervals``, as caches know them."""

    lo: bytes
    hi: bytes
    blind: Tensor | None  # [B * T] rows that see none, where there are such


class _Runs(NamedTuple):
    runs: list[_Run]
    window: int  # of all of them, 0: none


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
    lo, hi, blind = _shown(query, keys, is_causal, attn_mask)
    requests = _requests(lo, hi, rows, keys)
    _need_one_place(lo, hi, rows, requests.plan.window)
    flat = query.transpose(1, 2).flatten(0, 1)
    k, v = (x.transpose(1, 2).flatten(0, 1)[:, None] for x in (key, value))
    module = module_of("paged_prefix_attention", flat, k, v)
    rule = PagedRule(query.shape[3] ** -0.5 if scale is None else scale, 0.0, requests.plan.window)
    flat = flat if flat.stride(2) == 1 else flat.contiguous()
    out, lse = module.forward(PagedCall(flat, k, v, *requests, rule, None))
    if blind is not None:  # rows of padding: torch gives 0
        out = out.masked_fill(blind[:, None, None], 0)
        lse = lse.masked_fill(blind, 0)
    out = out.unflatten(0, (count, rows)).transpose(1, 2)
    return out, lse.unflatten(1, (count, rows)).transpose(0, 1)


def _need_one_place(lo: bytes, hi: bytes, rows: int, window: int) -> None:
    """A single row that sees a window behind a cache counts from the first key that the cache has kept, and
    the same row of a whole sequence from that sequence's: one block must not have both.
    """
    first, last = (memoryview(x).cast("i") for x in (lo, hi))
    if not len(first):
        return
    # torch makes rows of the heads that share keys
    alike = first[0] == first[rows - 1] and last[0] == last[rows - 1]
    if not window and not alike:
        return
    strict = invariance.is_strict()
    for setting in invariance.settings:
        places = setting.places[strict]
        if window:
            places.windows.add(window)
        else:
            places.steps.update(b - a + 1 for a, b in zip(first, last, strict=True))
        if places.windows & places.steps:
            raise Refused(
                "a row of a window behind a cache does not say where its sequence begins, as whole ones do: "
                "use the attention of rlkernel.register_hf()"
            )


def intervals(query: Tensor, keys: int, is_causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first and the last key that each row [B, T] sees; the first behind the last: none."""
    count, _, rows, _ = query.shape
    if mask is None:
        return _all(count, rows, keys, is_causal)
    seen = _seen(mask)
    if seen.shape[-3] > 1 and not bool((seen == seen[..., :1, :, :]).all()):
        raise Refused("its mask must be the same for all heads")
    seen = seen[..., 0, :, :].expand(count, rows, keys)
    if is_causal:
        seen = seen & torch.ones(rows, keys, dtype=torch.bool, device="cpu").tril()
    number = seen.sum(2)
    lo = seen.int().argmax(2)
    hi = keys - 1 - seen.flip(2).int().argmax(2)
    none = number == 0
    if not bool(((hi - lo + 1 == number) | none).all()):
        raise Refused("each row of its mask must show keys that follow each other")
    return lo.masked_fill(none, 0), hi.masked_fill(none, -1)


def _all(count: int, rows: int, keys: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The intervals where no mask hides any."""
    hi = torch.arange(rows, device="cpu") if is_causal else torch.full((rows,), keys - 1, device="cpu")
    return torch.zeros(count, rows, dtype=torch.int64, device="cpu"), hi.clamp(max=keys - 1).expand(
        count, rows
    )


def _shown(query: Tensor, keys: int, is_causal: bool, mask: Tensor | None) -> _Shown:
    if mask is None:  # that of a step of decoding: known from its shape, for all layers
        return _all_shown(query.shape[0], query.shape[2], keys, is_causal)
    return _as_bytes(*intervals(query, keys, is_causal, mask))


@functools.lru_cache(maxsize=16)
def _all_shown(count: int, rows: int, keys: int, is_causal: bool) -> _Shown:
    return _as_bytes(*_all(count, rows, keys, is_causal))


def _as_bytes(lo: Tensor, hi: Tensor) -> _Shown:
    blind = (lo > hi).flatten()
    return _Shown(_bytes(lo), _bytes(hi), blind if bool(blind.any()) else None)


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
def _runs(lo: bytes, hi: bytes, rows: int) -> _Runs:
    first, last = (torch.frombuffer(bytearray(x), dtype=torch.int32).long() for x in (lo, hi))
    begins, window = beginnings(first, last, rows)
    starts = begins.nonzero()[:, 0].tolist()
    ends = [*starts[1:], len(first)]
    runs = [_Run(a, b, int(first[a]), int(last[b - 1])) for a, b in zip(starts, ends, strict=True)]
    return _Runs(runs, window)


def beginnings(first: Tensor, last: Tensor, rows: int) -> tuple[Tensor, int]:
    """Which rows begin a sequence, and the window of all of them, 0 where none is seen."""
    place, width = torch.arange(len(first), device="cpu"), last - first + 1
    follows = (last[1:] == last[:-1] + 1) & (width[:-1] > 0) & (place[1:] % rows != 0)
    # a row that sees itself alone begins a sequence, also behind one of a single row
    slid = follows & (first[1:] == first[:-1] + 1) & (width[1:] > 1)
    begins = torch.ones(len(first), dtype=torch.bool, device="cpu")
    begins[1:] = ~(follows & (first[1:] == first[:-1]) | slid)
    if not bool(slid.any()):
        return begins, 0
    window = int(width[1:][slid][0])
    if int(width.max()) > window or bool((width[1:][slid] != window).any()):
        raise Refused(f"its rows must see one window, got one of {window} beside others")
    start = place.masked_fill(~begins, 0).cummax(0).values
    if bool((width[start[1:][slid]] > 1).any()):
        raise Refused(
            "rows of a window behind a cache do not say where their sequence begins: "
            "use the attention of rlkernel.register_hf()"
        )
    return begins, window


@functools.lru_cache(maxsize=16)
def _requests(lo: bytes, hi: bytes, rows: int, keys: int) -> Requests:
    """Of rows [B, T] and keys [B, Tk] that lie one behind the other; the layers of a model share it."""
    tables, lens, rows_of = [], [], [0]
    runs, window = _runs(lo, hi, rows)
    for run in runs:
        base = run.first // rows * keys + run.lo
        # a row that sees nothing is given a key, and its result thrown away
        lens.append(max(run.hi + 1 - run.lo, 1))
        tables.append(torch.arange(base, base + lens[-1], dtype=torch.int32, device="cpu"))
        rows_of.append(run.end)
    table = torch.zeros(len(tables), max(lens, default=0), dtype=torch.int32, device="cpu")
    for s, x in enumerate(tables):
        table[s, : len(x)] = x
    plan = paged.plan_of(table, lens, rows_of, 1, window)
    seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in (lens, rows_of))
    return Requests(table, seq_lens, cu_seqlens_q, plan)


def flash_attention_for_cpu_backward(
    original: Callable[..., Any],
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query [B, H, T, D], key and value [B, Hkv, Tk, D].

    Heads that share keys add up as those of a model that repeats its keys, as transformers does under a mask
    and not without one: each is rounded before.
    """
    need_floats(query, key, value)
    if dropout_p:
        raise Refused("dropout draws by a row's place")
    count, heads, rows, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if kv_heads != heads:
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    lo, hi, _ = _shown(query, keys, is_causal, attn_mask)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value, out, grad)]
    module = module_of("attention", *flat[:3])
    if used.backend != "native":
        raise Refused("its gradients are batch-invariant in the compiled kernels alone")
    results = AttentionResults(flat[3], lse.transpose(0, 1).flatten(1))
    rule = PagedRule(dim**-0.5 if scale is None else scale, 0.0, _runs(lo, hi, rows).window)
    found = module.gradients(*flat[:3], results, flat[4], _asked(lo, hi, rows, keys), rule)
    dq, dk, dv = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in found)
    if kv_heads != heads:
        apart = (x.unflatten(1, (kv_heads, -1)) for x in (dk, dv))
        dk, dv = (summed(x, [2], False, False, x.dtype) for x in apart)
    return dq, dk, dv


@functools.lru_cache(maxsize=16)
def _asked(lo: bytes, hi: bytes, rows: int, keys: int) -> Asked:
    """As _requests; the rows of a matrix of the batch are a group."""
    runs = [run for run in _runs(lo, hi, rows).runs if run.lo <= run.hi]
    bases = [run.first // rows * keys for run in runs]
    seen = [
        torch.arange(at + run.lo, at + run.hi + 1, device="cpu") for at, run in zip(bases, runs, strict=True)
    ]
    groups = [len(list(same)) for _, same in itertools.groupby(bases)]
    return asked([(run.first, run.end) for run in runs], seen, groups)


def _refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise Refused("use rlkernel.attention: this kernel splits its sums by the batch")


SERVED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": Short("step_of_sdpa", flash_attention_for_cpu),
    "_scaled_dot_product_flash_attention_for_cpu_backward": flash_attention_for_cpu_backward,
    "_scaled_dot_product_flash_attention": _refuse,
    "_scaled_dot_product_efficient_attention": _refuse,
    "_scaled_dot_product_cudnn_attention": _refuse,
}
