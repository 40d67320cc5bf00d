"""``prefix_shared_attention`` over a vendor's varlen kernels, by gather or by cascade.

Shared by the backends that have the three small kernels around them.  Which way and why:
``rlkernel.drivers.prefix_shared_attention``.  Neither differentiates through a merge:
vendors' kernels take no gradient of a lse.  Backward makes the calls of forward again, each with the whole
row's out and lse, and what a key gets from different calls is added up in fp32, in the order of the calls,
which the lengths decide.

Vendors' backward kernels, and most of their forward ones, have one head dim: where that of the values is
another than the keys', the narrower ones get zeros behind, which add nothing to a product, for a call's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.drivers import prefix_shared_attention_varlen as varlen
from rlkernel.drivers.prefix_shared_attention import Call, Cascade, cascade, gathers, widened
from rlkernel.drivers.prefix_shared_attention_varlen import Grads, Saved, Sequences, Varlen
from rlkernel.prefix.layout import Gathered, PrefixLayout, Run


class AttentionMerge(Protocol):
    """Merge the partial attention ``part`` [n, H, D], ``part_lse`` [H, n] into ``out``, ``lse`` of its rows.

    In place, with ``lse' = log(exp(lse) + exp(part_lse) + exp(sinks))`` equal to::

        out = exp(lse - lse') * out + exp(part_lse - lse') * part        lse = lse'

    ``lse`` and ``part_lse`` are fp32, -inf (or +inf, as FlashAttention 2 has it) of a row without keys, which
    weighs 0; a row where nothing has a weight gets out 0 and lse -inf.  Without ``part``, sinks alone count.
    The last dimension of each tensor must be contiguous, other strides are free.
    """

    def __call__(
        self,
        out: Tensor,
        lse: Tensor,
        part: Tensor | None,
        part_lse: Tensor | None,
        sinks: Tensor | None = None,
    ) -> None: ...


class GatherKv(Protocol):
    """``k[index], v[index]`` in one launch: [T, H, D] whose last dimension is contiguous, ``index`` int64."""

    def __call__(self, k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]: ...


class SegmentReduce(Protocol):
    """Row r of each result: the sum of ``source[index[offsets[r]:offsets[r + 1]]]``, in that order, in fp32.

    Sources are [K, H, D] and contiguous, the tables int64.  The results [len(offsets) - 1, H, D] are rounded
    once, to ``dtype``: fp32 or the sources' own, which is the default.
    """

    def __call__(
        self,
        source_k: Tensor,
        source_v: Tensor,
        index: Tensor,
        offsets: Tensor,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class Around(NamedTuple):
    """A backend's kernels around the vendors' attention."""

    attention_merge: AttentionMerge
    gather_kv: GatherKv
    segment_reduce: SegmentReduce


def reasons(q: Tensor, v: Tensor, rule: AttentionRule | None, needs_grad: bool) -> list[str]:
    """Why no vendor's kernel can run this: those of each; none where one can."""
    if wrong := device_reasons(q):
        return wrong
    found: list[str] = []
    for _, why in _refusals(q, v, rule, needs_grad):
        if not why:
            return []
        found += why
    return found


def device_reasons(q: Tensor) -> list[str]:
    """Why the vendors' kernels are not asked on a device.

    On ROCm torch has ``aten::_flash_attention_forward`` too, with the same schema over AOTriton, but what it
    does has changed with its releases: lse is [B, Hq, longest] in some of them and [Hq, T] in others (pytorch
    issue 187872), and so are the side on which a causal mask is aligned and what windows do.  As long as
    nobody has run it on such a device under these tests, it is not taken.
    """
    if q.device.type != "cuda":
        return [f"q must be on an NVIDIA GPU, got {q.device}"]
    if torch.version.hip is not None:
        return [f"q must be on an NVIDIA GPU, got {q.device} of ROCm, whose flash attention no test has seen"]
    return []


def path(q: Tensor, v: Tensor, rule: AttentionRule | None) -> str:
    """Whose kernels ``forward`` takes, and why not those before it; empty where there are none."""
    before: list[str] = []
    for kernel, why in _refusals(q, v, rule, needs_grad=True):
        if not why:
            return f"{kernel.name} ({'; '.join(before)})" if before else kernel.name
        before += why
    return ""


def _refusals(
    q: Tensor, v: Tensor, rule: AttentionRule | None, needs_grad: bool
) -> Iterator[tuple[Varlen, list[str]]]:
    softcap = rule.softcap if rule is not None else 0.0
    width = max(q.shape[2], v.shape[2])
    for kernel in varlen.KERNELS:
        yield kernel, kernel.reasons(q, softcap, needs_grad, width)


def forward(call: AttentionCall, around: Around) -> AttentionResults:
    q, k, v, layout, rule, sinks, _ = call
    v_dim, width = v.shape[2], max(q.shape[2], v.shape[2])
    if not layout.total:
        out = q.new_empty(*q.shape[:2], v_dim)
        wide = torch.promote_types(q.dtype, torch.float32)
        return AttentionResults(out, q.new_empty(q.shape[1], 0, dtype=wide))
    q, k, v = (widened(x, width) for x in (q, k, v))
    way = _gather if gathers(layout, rule, q.shape[1], k.shape[1]) else _cascade
    out, lse = way(Pass(_kernel(q, rule), around, layout, rule), q, k, v)
    out = out[..., :v_dim].contiguous()
    if sinks is not None:
        around.attention_merge(out, lse, None, None, sinks)
    return AttentionResults(out, lse)


def backward(
    call: AttentionCall, results: AttentionResults, grads: OutGrads, around: Around
) -> AttentionGrads:
    q, k, v, layout, rule, *_ = call
    (out, lse), (grad_out,) = results, grads
    if not layout.total:
        return AttentionGrads(q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape))
    dims, width = (q.shape[2], k.shape[2], v.shape[2]), max(q.shape[2], v.shape[2])
    q, k, v, out, grad_out = (widened(x, width) for x in (q, k, v, out, grad_out))
    way = _gather_backward if gathers(layout, rule, q.shape[1], k.shape[1]) else _cascade_backward
    # the calls of a cascade read it again and again, some of them by 16 bytes: no copy each time
    made = Pass(_kernel(q, rule), around, layout, rule)
    found = way(made, varlen.aligned(grad_out), Saved(q, k, v, out, lse))
    return AttentionGrads(*(x[..., :d].contiguous() for x, d in zip(found, dims, strict=True)))


def _kernel(q: Tensor, rule: AttentionRule) -> Varlen:
    """The first that can do backward too, so that a trainer and its rollout take the same; else any."""
    for needs_grad in (True, False):
        for kernel in varlen.KERNELS:
            if not kernel.reasons(q, rule.softcap, needs_grad):
                return kernel
    reasons = [reason for kernel in varlen.KERNELS for reason in kernel.reasons(q, rule.softcap, False)]
    raise NotImplementedError("; ".join(reasons))


class Pass(NamedTuple):
    """What a way needs besides the tensors."""

    kernel: Varlen
    around: Around
    layout: PrefixLayout
    rule: AttentionRule


# gather


class Copies(NamedTuple):
    """Where each row was copied to: ``places[offsets[r]:offsets[r + 1]]`` of the gathered keys."""

    places: Tensor  # int64 [K]
    offsets: Tensor  # int64 [T + 1]


def copies(layout: PrefixLayout, device: torch.device | str = "cpu") -> Copies:
    """The tables for the sum of what the copies of a row got, made once for each device."""
    return layout._on(device, "copies", lambda: _copies(layout.gathered().keys))


def _copies(keys: Tensor) -> Copies:
    # stable: the copies of a row follow one another in the order of the segments that they were made for
    places = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys)
    return Copies(places, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _sequences(gathered: Gathered, rule: AttentionRule) -> Sequences:
    # vendors may choose a kernel by the longest sequence that asks: for the dense call's bits, its longest
    longest = gathered.max_seqlen_k if rule.bitwise else gathered.max_seqlen_q
    return Sequences(
        gathered.cu_seqlens_q, gathered.cu_seqlens_k, longest, gathered.max_seqlen_k, rule.scale, True,
        rule.window, rule.softcap,
    )  # fmt: skip


def _gathered(around: Around, k: Tensor, v: Tensor, gathered: Gathered) -> tuple[Tensor, Tensor]:
    if len(gathered.keys) == len(k):  # nothing is shared
        return k, v
    return around.gather_kv(k, v, gathered.keys)


def _gather(made: Pass, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kernel, around, layout, rule = made
    gathered = layout.gathered(q.device)
    return kernel.forward(q, *_gathered(around, k, v, gathered), _sequences(gathered, rule))


def _gather_backward(made: Pass, grad_out: Tensor, saved: Saved) -> Grads:
    kernel, around, layout, rule = made
    q, k, v, out, lse = saved
    gathered = layout.gathered(q.device)
    # again, rather than kept from forward for each layer: they are as large as G prompts
    ks, vs = _gathered(around, k, v, gathered)
    dq, dk, dv = kernel.backward(grad_out, Saved(q, ks, vs, out, lse), _sequences(gathered, rule))
    if ks is not k:
        dk, dv = around.segment_reduce(dk, dv, *copies(layout, q.device))
    return dq, dk, dv


# cascade


def _own(tables: Cascade, rule: AttentionRule) -> Sequences:
    return Sequences(
        tables.own, tables.own, tables.max_own, tables.max_own, rule.scale, True, 0, rule.softcap
    )  # fmt: skip


def _above(tables: Cascade, call: Call, rule: AttentionRule) -> Sequences:
    cu_rows, cu_keys = (x[slice(*call.cu_seqlens)] for x in (tables.cu_rows, tables.cu_keys))
    return Sequences(cu_rows, cu_keys, call.max_rows, call.max_keys, rule.scale, False, 0, rule.softcap)


def _cascade(made: Pass, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kernel, around, layout, rule = made
    tables = cascade(layout, q.device)
    out, lse = kernel.forward(q, k, v, _own(tables, rule))
    for call in tables.calls:
        rows, keys = slice(*call.rows), slice(*call.keys)
        part, part_lse = kernel.forward(q[rows], k[keys], v[keys], _above(tables, call, rule))
        for run in call.asked:
            to, at = slice(*run), _inside(run, call.rows)
            around.attention_merge(out[to], lse[:, to], part[at], part_lse[:, at])
    return out, lse


def _cascade_backward(made: Pass, grad_out: Tensor, saved: Saved) -> Grads:
    kernel, _, layout, rule = made
    q, k, v, out, lse = saved
    tables = cascade(layout, q.device)
    dq, dk, dv = kernel.backward(grad_out, saved, _own(tables, rule))
    if len(tables.calls) > 1:  # more than two terms; two are added in fp32 and rounded once as they are
        dq, dk, dv = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (dq, dk, dv))
    for call in tables.calls:
        rows, keys = slice(*call.rows), slice(*call.keys)
        piece = Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows])
        parts = kernel.backward(grad_out[rows], piece, _above(tables, call, rule))
        for total, part, whole, runs in (
            (dq, parts[0], call.rows, call.asked),
            (dk, parts[1], call.keys, call.answered),
            (dv, parts[2], call.keys, call.answered),
        ):
            for run in runs:
                total[slice(*run)].add_(part[_inside(run, whole)])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _inside(run: Run, whole: Run) -> slice:
    return slice(run[0] - whole[0], run[1] - whole[0])
