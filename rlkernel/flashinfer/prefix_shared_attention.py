"""``prefix_shared_attention`` over FlashInfer, by name, where no gradient is asked for.

One ragged prefill call, each segment's rows on a copy of all keys of its path.  Its plan is made on the host,
once for the layers of a model, which pass the same layout one after another.

Its kernels take multi-head latent attention's values as they are, narrower than the keys.  In other cases the
narrower ones get zeros behind, which add nothing to a product.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.drivers.prefix_shared_attention import widened
from rlkernel.flashinfer._attention import HEAD_DIMS, WORKSPACE, library, natural, tensor_reasons
from rlkernel.prefix.layout import PrefixLayout

LATENT = (192, 128)  # the one pair of head dims with narrower values that its kernels are compiled for


def unsupported(
    q: Tensor,
    *tensors: Tensor,
    rule: AttentionRule | None = None,
    needs_grad: bool = False,
    **options: Any,
) -> list[str]:
    reasons = ["flashinfer has no backward, a gradient is asked for"] if needs_grad else []
    reasons += tensor_reasons("q", q)
    dims = q.shape[2], tensors[1].shape[2] if len(tensors) > 1 else q.shape[2]
    if dims != LATENT and max(dims) not in HEAD_DIMS:
        want = f"{', '.join(map(str, HEAD_DIMS))}, or {LATENT[0]} with values of {LATENT[1]}"
        reasons.append(f"the head dim must be one of {want}, got {dims[0]} with values of {dims[1]}")
    if rule is not None and rule.bitwise:
        reasons.append("parity must be 'fast': flashinfer splits keys by the size of the batch")
    if not reasons:  # an import takes seconds and sets up CUDA
        _, missing = library()
        reasons += [missing] if missing else []
    return reasons


def forward(call: AttentionCall) -> AttentionResults:
    q, k, v, layout, rule, sinks, _ = call
    v_dim = v.shape[2]
    if not layout.total:
        out = q.new_empty(*q.shape[:2], v_dim)
        return AttentionResults(out, q.new_empty(q.shape[1], 0, dtype=torch.float32))
    if (q.shape[2], v_dim) != LATENT:
        q, k, v = (widened(x, max(q.shape[2], v_dim)) for x in (q, k, v))
    gathered = layout.gathered(q.device)
    if len(gathered.keys) > len(k):
        k, v = k[gathered.keys], v[gathered.keys]
    wrapper = _planned(layout, _Plan(rule, q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype), q.device)
    # the default of every version: base 2, [T, Hq]
    out, lse2 = wrapper.run(q.contiguous(), k.contiguous(), v.contiguous(), return_lse=True)
    return AttentionResults(*natural(out[..., :v_dim].contiguous(), lse2, sinks))


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    raise NotImplementedError("flashinfer has no backward")


class _Plan(NamedTuple):
    rule: AttentionRule
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: torch.dtype


class _Wrapper:
    """FlashInfer's wrapper, and what it was planned for last."""

    def __init__(self, device: torch.device) -> None:
        found, _ = library()
        assert found is not None
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.wrapper = found.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.layout: weakref.ref[PrefixLayout] | None = None
        self.plan: _Plan | None = None


def _planned(layout: PrefixLayout, plan: _Plan, device: torch.device) -> Any:
    kept = _wrapper(device, torch.cuda.current_stream(device).cuda_stream)
    if kept.plan != plan or kept.layout is None or kept.layout() is not layout:
        host = layout.gathered()  # it copies tables to the host otherwise
        kept.wrapper.plan(
            host.cu_seqlens_q, host.cu_seqlens_k, plan.heads, plan.kv_heads, plan.head_dim,
            head_dim_vo=plan.v_dim, causal=True, window_left=plan.rule.window - 1,
            logits_soft_cap=plan.rule.softcap or None, sm_scale=plan.rule.scale,
            q_data_type=plan.dtype, kv_data_type=plan.dtype,
        )  # fmt: skip
        kept.layout, kept.plan = weakref.ref(layout), plan
    return kept.wrapper


@functools.cache
def _wrapper(device: torch.device, stream: int) -> _Wrapper:
    return _Wrapper(device)  # its workspace belongs to one stream
