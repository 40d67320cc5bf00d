"""Causal attention over packed prompts and completions, each prompt's keys read by all of its completions."""

import math
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel import dispatch
from rlkernel.calls.prefix_shared_attention import (
    PARITIES,
    AttentionCall,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.opaque import Grads, Op
from rlkernel.ops import _validate
from rlkernel.ops._options import PrefixAttentionOptions
from rlkernel.ops._typed import typed
from rlkernel.prefix.batch import PrefixBatch
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.runtime.modes import without_autocast
from rlkernel.types import Parity

# A pass without gradients runs where the one with them does, so that on-policy logprobs are the same bits on
# both sides of a ratio: flashinfer, which has no backward, runs where it is asked for by name.
ORDER = ("native", "triton", "reference")
HOPPER = 9  # its compute capability


def order_on(device: torch.device) -> tuple[str, ...]:
    """On NVIDIA GPUs from Hopper on the Triton kernels come before FlashAttention 2 and torch's, whose
    deterministic backward takes 1.2 to 2.7 times as long on an H200; behind FlashAttention 3 and 4."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return ORDER
    from rlkernel.drivers import prefix_shared_attention_varlen as varlen

    if varlen.capability(device)[0] < HOPPER or varlen.has_newer():
        return ORDER
    return ("triton", "native", "reference")


NO_NEEDS: tuple[bool, ...] = (False,) * 4


@overload
def prefix_shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PrefixBatch | PrefixLayout,
    *,
    return_lse: Literal[True],
    **options: Unpack[PrefixAttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def prefix_shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PrefixBatch | PrefixLayout,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PrefixAttentionOptions],
) -> Tensor: ...


@overload
def prefix_shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PrefixBatch | PrefixLayout,
    *,
    return_lse: bool,
    **options: Unpack[PrefixAttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@typed
def prefix_shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PrefixBatch | PrefixLayout,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    parity: Parity = "fast",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from every row of a packed batch to its own sequence: shared prefix, then its own tokens.

    Equal to, for row i of head h, which reads K/V head ``h * Hkv // Hq``, over the rows j of its sequence
    with ``0 <= pos[i] - pos[j] < window``,

        s_ij = softcap * tanh(scale * q_i . k_j / softcap)          scale * q_i . k_j without a softcap
        lse_i = log(sum_j exp(s_ij) + exp(sinks[h]))                without the last term without sinks
        out_i = sum_j exp(s_ij - lse_i) * v_j

    which is what the ordinary causal attention gives each sample alone.  A prompt's rows are computed once,
    whatever the number of completions, and so are their gradients, which sum over all completions in fp32 in
    an order that the lengths alone decide: the same call gives the same bits (run-to-run).

    Args:
        q: [T, Hq, D] fp16, bf16, fp32 or fp64, in the row order of ``batch``.
        k, v: [T, Hkv, D] and [T, Hkv, Dv] of the same dtype; Hq is a multiple of Hkv.  Dv may be another
            than D (multi-head latent attention); only vendors' kernels that have one head dim get the
            narrower ones with zeros behind.
        batch: PrefixBatch, or its ``layout``: a forest of segments of any depth.
        scale: None means ``1 / sqrt(D)``.
        softcap: > 0, or None.
        window: how many positions a row sees, itself included; None means all.  Follows ``sliding_window`` of
            transformers; FlashAttention's left window is one less.
        sinks: [Hq], a logit beside each row's that takes weight and gives nothing (gpt-oss); differentiable.
        return_lse: also return ``lse`` [Hq, T] in natural log, fp32 (fp64 for fp64), the sinks included.
            It has no gradient.
        parity: "fast", or "bitwise": ``out`` and ``lse`` have the bits of the same call on
            ``batch.layout.repeated()``, where every sample has its own copy of the prompt.

    Returns:
        out [T, Hq, Dv] in q's dtype, or (out, lse).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    The extra memory does not grow with the group: O(T) besides the result.  Follows Hydragen
    (arXiv 2402.05099) in splitting a row's keys, and ring attention in giving backward the whole row's lse;
    the tree of TRL's asynchronous GRPO trainer and PrefixGrouper (arXiv 2506.05433) do the same work.

    Examples:
        >>> batch = rlkernel.PrefixBatch.pack([[5, 6, 7]], [[[1, 2], [3, 4]]])
        >>> q, k = torch.randn(batch.total, 4, 16), torch.randn(batch.total, 2, 16)
        >>> rlkernel.prefix_shared_attention(q, k, k, batch).shape
        torch.Size([6, 4, 16])
    """
    layout = check_tensors(q, k, v, batch, sinks)
    rule = check_options(scale, softcap, window, parity, q.shape[2])
    if rule.window > layout.max_position:
        rule = rule._replace(window=0)  # nothing is outside, and kernels without a window can run
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    needs = NO_NEEDS
    if torch.is_grad_enabled():
        sinks_need = sinks is not None and sinks.requires_grad
        needs = (q.requires_grad, k.requires_grad, v.requires_grad, sinks_need)
    out, lse = op(AttentionCall(q, k, v, layout, rule, sinks, needs))
    return (out, lse) if return_lse else out


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, batch: PrefixBatch | PrefixLayout, sinks: Tensor | None
) -> PrefixLayout:
    if not isinstance(batch, (PrefixBatch, PrefixLayout)):
        raise ValueError(f"batch must be a PrefixBatch or a PrefixLayout, got {type(batch).__name__}")
    layout = batch.layout if isinstance(batch, PrefixBatch) else batch
    for name, x in (("q", q), ("k", k), ("v", v)):
        _validate.floating(name, x)
        heads = "Hq" if name == "q" else "Hkv"
        if x.dim() != 3 or x.shape[0] != layout.total:
            want = f"[T, {heads}, D] with the batch's T = {layout.total}"
            raise ValueError(f"{name} must be {want}, got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            want, got = _validate.name(q.dtype), _validate.name(x.dtype)
            raise ValueError(f"{name} must have q's dtype {want}, got {got}")
        _validate.same_device(name, x, "q", q.device)
    if v.shape[1] != k.shape[1] or not v.shape[2]:
        want = f"[T, {k.shape[1]}, Dv], with k's heads and Dv of 1 at least"
        raise ValueError(f"v must be {want}, got {tuple(v.shape)}")
    if q.shape[2] != k.shape[2] or not q.shape[2]:
        raise ValueError(f"k must have q's head dim {q.shape[2]}, at least 1, got {k.shape[2]}")
    if not k.shape[1] or q.shape[1] % k.shape[1] or not q.shape[1]:
        raise ValueError(f"q must have a multiple of the {k.shape[1]} heads of k, got {q.shape[1]}")
    if sinks is not None:
        _validate.floating("sinks", sinks)
        _validate.same_device("sinks", sinks, "q", q.device)
        if sinks.shape != (q.shape[1],):
            raise ValueError(f"sinks must have shape ({q.shape[1]},), one a head, got {tuple(sinks.shape)}")
    return layout


def check_options(
    scale: float | None, softcap: float | None, window: int | None, parity: str, head_dim: int
) -> AttentionRule:
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be > 0 and finite, or None, got {value!r}")
    if window is not None:
        _validate.at_least_one("window", window, ", or None")
    _validate.choice("parity", parity, PARITIES)
    return AttentionRule(
        head_dim**-0.5 if scale is None else float(scale),
        float(softcap or 0),
        int(window or 0),
        parity == "bitwise",
    )


def _pick(call: AttentionCall) -> ModuleType:
    q, k, v, layout, rule, sinks, needs = call
    return dispatch.pick(
        "prefix_shared_attention", q, k, v, layout=layout, rule=rule, sinks=sinks, needs_grad=True in needs
    )


def forward(impl: ModuleType, call: AttentionCall) -> AttentionResults:
    with without_autocast(call.q.device):  # the dtype is that of the tensors
        return impl.forward(call)


def backward(impl: ModuleType, call: AttentionCall, results: AttentionResults, grads: Grads) -> Grads:
    grad_out = grads[0]
    assert grad_out is not None
    found: Grads = (None,) * 3
    with without_autocast(call.q.device):
        if any(call.needs[:3]):
            found = impl.backward(call, results, OutGrads(grad_out))
        if not call.needs[3]:
            return *found, None
        assert call.sinks is not None
        return *found, _sink_gradient(grad_out, *results, call.sinks)


def _sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    # d lse / d sink = exp(sink - lse), and out shrinks with it
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # [Hq, T]
    delta = torch.linalg.vecdot(grad_out.to(lse.dtype), out.to(lse.dtype)).T
    return -(weight * delta).sum(1).to(sinks.dtype)


def like(call: AttentionCall) -> AttentionResults:
    rows, heads, _ = call.q.shape
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    out = call.q.new_empty(rows, heads, call.v.shape[2])
    return AttentionResults(out, call.q.new_empty(heads, rows, dtype=dtype))


op = Op(
    "prefix_shared_attention",
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
