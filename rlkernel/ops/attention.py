"""Causal attention whose bits depend on a row's own sequence alone, in training as in an engine's steps."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel import dispatch
from rlkernel.calls.attention import AttentionCall, AttentionResults
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._options import AttentionOptions
from rlkernel.ops._typed import typed
from rlkernel.ops.paged_prefix_attention import paged_prefix_attention
from rlkernel.ops.prefix_shared_attention import (
    NO_NEEDS,
    backward,
    check_options,
    check_tensors,
    forward,
    like,
)
from rlkernel.prefix.batch import PrefixBatch
from rlkernel.prefix.layout import PrefixLayout

# of these alone a row has the same bits in every batch
ORDER = ("native", "triton", "reference")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@typed
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    batch: PrefixBatch | PrefixLayout | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each row to its own sequence, with the same bits in every batch, packing and engine.

    Equal to, for row i of head h, which reads K/V head ``h * Hkv // Hq``, over the rows j of its sequence
    with ``0 <= pos[i] - pos[j] < window``,

        s_ij = softcap * tanh(scale * q_i . k_j / softcap)          scale * q_i . k_j without a softcap
        lse_i = log(sum_j exp(s_ij) + exp(sinks[h]))                without the last term without sinks
        out_i = sum_j exp(s_ij - lse_i) * v_j

    which is ``scaled_dot_product_attention(is_causal=True, enable_gqa=True)`` and FlashAttention's varlen
    call.  A row's bits are those of ``paged_prefix_attention`` at its position: whole sequences, packed ones,
    prompts that completions share, chunks of a prefill and single steps on any cache agree in every bit.

    Args:
        q: [B, Tq, Hq, D], the rows the last of Tk positions; or packed [T, Hq, D] with ``cu_seqlens_q`` or
            ``batch``.  fp16, bf16, fp32 or fp64.
        k, v: [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv], or packed, of the same dtype; Hq is a multiple of Hkv.
        cu_seqlens_q: [B + 1], where the rows of each sequence begin, from 0 to T.  It is read, so this
            synchronises on a GPU; a ``batch`` does not.
        cu_seqlens_k: [B + 1], the same of k and v, each sequence at least as long as in q; None means
            ``cu_seqlens_q``.
        batch: PrefixBatch, or its ``layout``: prompts that several completions share.  torch.compile needs
            one.
        scale: None means ``1 / sqrt(D)``.
        softcap: > 0, or None.
        window: how many positions a row sees, itself included; None means all.
        sinks: [Hq], a logit beside each row's that takes weight and gives nothing; differentiable.
        return_lse: also return ``lse`` in natural log, fp32 (fp64 for fp64), the sinks included; it has no
            gradient.

    Returns:
        out in q's dtype and shape, with v's last dimension, or (out, lse [Hq, T]), [B, Hq, Tq] if not packed.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  So is a gradient where
            q has fewer rows than k.

    On a CPU a sequence's gradients have the same bits in every batch too; those of Triton are run-to-run.
    Splits of the keys whose size is fixed follow Thinking Machines' batch-invariant attention (2025).

    Examples:
        >>> q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16)
        >>> whole, last = rlkernel.attention(q, k, k), rlkernel.attention(q[:, -1:], k, k)
        >>> torch.equal(whole[:, -1:], last)
        True
    """
    if batch is None and torch.compiler.is_compiling():
        raise ValueError("batch must be given under torch.compile, which cannot make one, got None")
    options = {"scale": scale, "softcap": softcap, "window": window, "sinks": sinks}
    if q.dim() == 4:
        _none("4-dimensional q", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, batch=batch)
        out, lse = _dense(q, k, v, options)
    elif batch is not None:
        _none("batch", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        out, lse = _packed(q, k, v, batch, options)
    elif cu_seqlens_q is None:
        raise ValueError(f"q must be [B, Tq, Hq, D] without cu_seqlens_q or batch, got {tuple(q.shape)}")
    else:
        starts = _starts("cu_seqlens_q", cu_seqlens_q, q)
        keys = starts if cu_seqlens_k is None else _starts("cu_seqlens_k", cu_seqlens_k, k)
        if keys == starts:
            out, lse = _packed(q, k, v, _layout(starts), options)
        else:
            out, lse = _behind(q, k, v, starts, keys, options)
    return (out, lse) if return_lse else out


def _packed(
    q: Tensor, k: Tensor, v: Tensor, batch: PrefixBatch | PrefixLayout, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    sinks = options["sinks"]
    layout = check_tensors(q, k, v, batch, sinks)
    rule = check_options(options["scale"], options["softcap"], options["window"], "fast", q.shape[2])
    if rule.window > layout.max_position:
        rule = rule._replace(window=0)  # nothing is outside
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    needs = NO_NEEDS
    if torch.is_grad_enabled():
        needs = (*(x.requires_grad for x in (q, k, v)), sinks is not None and sinks.requires_grad)
    return op(AttentionCall(q, k, v, layout, rule, sinks, needs))


def _dense(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    count, rows = q.shape[:2]
    for name, x, keys in (("k", k, "Tk"), ("v", v, k.shape[1] if k.dim() == 4 else "Tk")):
        if x.dim() != 4 or x.shape[0] != count or keys not in ("Tk", x.shape[1]):
            raise ValueError(f"{name} must be [{count}, {keys}, Hkv, D] beside q, got {tuple(x.shape)}")
    keys = k.shape[1]
    if rows > keys:
        raise ValueError(f"k must have at least q's {rows} rows, got {keys}")
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    starts, ends = (tuple(n * i for i in range(count + 1)) for n in (rows, keys))
    if rows == keys:
        out, lse = _packed(q, k, v, _layout(starts), options)
    else:
        out, lse = _behind(q, k, v, starts, ends, options)
    return out.unflatten(0, (count, rows)), lse.unflatten(1, (count, rows)).transpose(0, 1)


def _behind(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], keys: Sequence[int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Rows behind keys that have no rows here: those of earlier calls."""
    if len(starts) != len(keys):
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's shape ({len(starts)},), got ({len(keys)},)")
    inputs = [x for x in (q, k, v, options["sinks"]) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError(
            "q must have the rows of k where a gradient is wanted, got sequences that are shorter"
        )
    lens = [end - first for first, end in zip(keys, keys[1:], strict=False)]
    table = torch.zeros(len(lens), max(lens, default=0), dtype=torch.int32, device="cpu")
    for s, first in enumerate(keys[:-1]):
        table[s, : lens[s]] = torch.arange(first, first + lens[s], device="cpu")
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cpu")  # of no sequence too
    table, seq_lens, begins = (x.to(q.device) for x in (table, seq_lens, torch.tensor(starts, device="cpu")))
    keys_and_values = k[:, None], v[:, None]
    found = paged_prefix_attention(q, *keys_and_values, table, seq_lens, begins, **options, return_lse=True)
    assert isinstance(found, tuple)
    return found


def _none(beside: str, **arguments: object) -> None:
    for name, x in arguments.items():
        if x is not None:
            raise ValueError(f"{name} must be None beside {beside}, got {type(x).__name__}")


def _starts(argument: str, starts: Tensor, x: Tensor) -> tuple[int, ...]:
    if starts.dim() != 1 or starts.dtype not in (torch.int32, torch.int64) or not len(starts):
        got = f"{_validate.name(starts.dtype)} {tuple(starts.shape)}"
        raise ValueError(f"{argument} must be [B + 1] int32 or int64, got {got}")
    _validate.readable(argument, starts, "give a batch, which has read them")
    starts = starts.cpu()
    _validate.ascending(argument, starts, len(x))
    return tuple(starts.tolist())


@functools.lru_cache(maxsize=16)
def _layout(starts: Sequence[int]) -> PrefixLayout:
    """Sequences that share nothing."""
    lengths = tuple(end - first for first, end in zip(starts, starts[1:], strict=False) if first < end)
    return PrefixLayout(lengths, (-1,) * len(lengths), (True,) * len(lengths))


def _pick(call: AttentionCall) -> ModuleType:
    q, k, v, layout, rule, sinks, needs = call
    return dispatch.pick(
        "attention", q, k, v, layout=layout, rule=rule, sinks=sinks, needs_grad=True in needs
    )


op = Op(
    "attention",
    AttentionCall,
    AttentionResults,
    pick=_pick,
    forward=forward,
    backward=backward,
    like=like,
    gradients=("q", "k", "v", "sinks"),
    differentiable=("out",),
    saves=("q", "k", "v", "sinks", "out", "lse"),
)
