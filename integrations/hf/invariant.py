"""Ordinary calls inside ``rlkernel.batch_invariant``, with the bits that an engine gives their rows.

sdpa passes over a softcap and knows no positions behind a window, and the sums of eager code follow the
padding.  Here a row's keys are counted from the beginning of its sequence, wherever that lies in the batch or
in front of what a cache has kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlkernel import dispatch
from rlkernel.consistency.aten_attention import beginnings, intervals
from rlkernel.consistency.aten_call import FLOATS, Refused
from rlkernel.integrations.hf.ordinary import NAMES_THAT_MODELS_KNOW
from rlkernel.integrations.hf.packed_call import IGNORED, OPTIONS, is_causal
from rlkernel.ops.attention import attention
from rlkernel.ops.paged_prefix_attention import paged_prefix_attention
from rlkernel.runtime import invariance, ranges


class _Rows(NamedTuple):
    """The rows of a batch that are not padding, sequence by sequence."""

    rows: Tensor  # [N], of B * T
    own: Tensor  # [N]: the key of each row, of B * Tk
    starts: Tensor  # int32 [S + 1]
    lens: Tensor  # int32 [S]
    table: Tensor  # int32 [S, longest]
    whole: bool  # each sequence has a row for each of its keys


def takes(module: nn.Module, name: str, query: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is served here: what it asks for is known, and its rows see what is in front of them."""
    if not invariance.is_on() or name not in NAMES_THAT_MODELS_KNOW or args:
        return False
    if not is_causal(module, kwargs):  # an encoder's, which sdpa serves
        return False
    known = all(k in IGNORED or k in OPTIONS or x is None for k, x in kwargs.items())
    plain = not kwargs.get("dropout") and not kwargs.get("output_attentions")
    return known and plain and query.dtype in FLOATS


def invariant_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """[B, Tq, Hq, Dv], as transformers' functions return it.

    Raises:
        RuntimeError: the mask shows a row other keys than those in front of it in its sequence and window.
    """
    query, key, value = autocast(query, key, value)
    count, _, rows, dim = query.shape
    keys, window = key.shape[2], kwargs.get("sliding_window") or 0
    scale = dim**-0.5 if (given := kwargs.get("scaling")) is None else given
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if rows == 1 and not ranges.watched() and (step := _step()) is not None:
        positions = kwargs.get("position_ids")
        out = step((query, key, value, mask, positions), _options(scale, softcap, window, sinks))
        if out is not None:
            return out, None
    causal = mask is None and rows > 1
    try:
        first, last = intervals(query, keys, causal, mask)
        positions = _positions(kwargs.get("position_ids"), count, rows)
        found = _rows(_bytes(first), _bytes(last), positions, rows, keys, window)
    except Refused as refused:
        raise RuntimeError(
            f"{type(module).__name__}: attention must be invariant inside rlkernel.batch_invariant(), "
            f"got a call that is not: {refused}"
        ) from None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "window": window or None,
        "sinks": sinks,
    }
    seen, own = found.rows.to(q.device), found.own.to(q.device)
    if found.whole:
        out = attention(q[seen], k[own], v[own], cu_seqlens_q=found.starts, **options)
    else:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise RuntimeError("no gradient must be wanted behind a cache inside rlkernel.batch_invariant()")
        tables = (x.to(q.device) for x in (found.table, found.lens, found.starts))
        out = paged_prefix_attention(q[seen], k[:, None], v[:, None], *tables, **options)
    assert isinstance(out, Tensor)
    if len(seen) < count * rows:  # rows of padding: 0, as torch gives them
        out = out.new_zeros(count * rows, *out.shape[1:]).index_copy(0, seen, out)
    return out.unflatten(0, (count, rows)), None


@functools.cache
def _step() -> Any:
    """The short way of a step of decoding, in which a kernel has little to do; None where there is none."""
    return dispatch.direct("step_attention")


def _options(scale: float, softcap: float | None, window: int, sinks: Tensor | None) -> dict[str, Any]:
    return {"scale": float(scale), "softcap": float(softcap or 0), "window": window, "sinks": sinks}


def autocast(*tensors: Tensor) -> list[Tensor]:
    """As autocast does for sdpa."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _positions(positions: Any, count: int, rows: int) -> bytes | None:
    if not isinstance(positions, Tensor) or positions.shape not in ((1, rows), (count, rows)):
        return None
    return _bytes(positions.expand(count, rows))


def _bytes(x: Tensor) -> bytes:
    return x.cpu().to(torch.int32).contiguous().numpy().tobytes()


@functools.lru_cache(maxsize=16)
def _rows(first: bytes, last: bytes, positions: bytes | None, rows: int, keys: int, window: int) -> _Rows:
    """Made once for the layers of a model that see the same keys."""
    lo, hi = _numbers(first), _numbers(last)
    sees = hi >= lo
    place = torch.arange(len(lo), device="cpu") % rows
    _need_causal(lo, hi, sees, place)
    sees[1:] &= (hi[1:] > hi[:-1]) | (place[1:] == 0)  # a row behind a sequence sees its last key again
    seen = sees.nonzero()[:, 0]
    origin = None if positions is None else hi - _numbers(positions)
    if origin is None or not _explained(lo, hi, origin, window)[seen].all():
        # positions that count the padding, or are of images: the mask alone says where a sequence begins
        begins, _ = beginnings(lo, hi, rows)
        origin = lo[torch.arange(len(lo), device="cpu").masked_fill(~begins, 0).cummax(0).values]
        if not _explained(lo, hi, origin, window)[seen].all():
            raise Refused("each row must see the keys of its sequence and window up to itself")
    lo, hi, origin = lo[seen], hi[seen], origin[seen]
    begins = torch.ones(len(seen), dtype=torch.bool, device="cpu")
    begins[1:] = (
        (seen[1:] // rows != seen[:-1] // rows) | (hi[1:] != hi[:-1] + 1) | (origin[1:] != origin[:-1])
    )
    starts = [*begins.nonzero()[:, 0].tolist(), len(seen)]
    base = seen // rows * keys
    ends = torch.tensor(starts[1:], device="cpu") - 1
    lens = (hi - origin + 1)[ends]
    table = torch.arange(int(lens.max()) if len(lens) else 0, device="cpu") + origin[ends][:, None]
    # in front of what the cache has kept no row sees anything
    table = (table.clamp(min=0) + base[ends][:, None]).where(table < hi[ends][:, None] + 1, 0)
    whole = torch.equal(lens, torch.tensor(starts, device="cpu").diff())
    return _Rows(seen, base + hi, torch.tensor(starts, device="cpu").int(), lens.int(), table.int(), whole)


def _need_causal(lo: Tensor, hi: Tensor, sees: Tensor, place: Tensor) -> None:
    """Rows whose last keys are alike are one and those of padding behind it, unless they see what is behind
    themselves: then the first of them sees several keys more than the row in front of it, or falls back.
    """
    behind = torch.zeros(len(hi), dtype=torch.bool, device="cpu")
    behind[1:] = sees[1:] & (place[1:] > 0) & (hi[1:] <= hi[:-1])
    alone = torch.ones(len(hi), dtype=torch.bool, device="cpu")  # the row that is the last key's own
    alone[1:] = (place[1:] == 0) | (hi[1:] != hi[:-1] + 1)
    alone &= ~behind & (hi > lo)
    falls = behind[1:] & (hi[1:] < hi[:-1])
    if bool(falls.any()) or bool((behind[1:] & alone[:-1]).any()):
        raise Refused("each row must see the keys of its sequence and window up to itself")


def _numbers(x: bytes) -> Tensor:
    return torch.frombuffer(bytearray(x), dtype=torch.int32).long()


def _explained(lo: Tensor, hi: Tensor, origin: Tensor, window: int) -> Tensor:
    """Whether rows see the keys from ``origin`` on that are in their window."""
    return lo == (torch.maximum(origin, hi - window + 1) if window else origin)
