"""Vendors' varlen attention kernels as they are called, played by torch on the CPU.

Each has the signature, the layouts and the habits of the one whose name it bears: what a row without keys
returns, what is written into memory of the caller, that no gradient of a lse is taken, that a row's tensors
must start at 16 bytes.  ``CALLS`` lists what was launched.
"""

import importlib.util
import math
from types import SimpleNamespace

import torch

from rlkernel.drivers import prefix_shared_attention_varlen as varlen
from rlkernel.native.prefix_shared_attention import flash

PASSES = {"native": flash}  # backends that run over the vendors' kernels
if importlib.util.find_spec("triton"):
    from rlkernel.triton_ops import prefix_shared_attention_flash

    PASSES["triton"] = prefix_shared_attention_flash

CALLS: list[str] = []


def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap, no_keys):
    """out and lse, row by row: a row's bits depend on its own keys alone, as a tiled kernel's do."""
    check(q, k, v, cu_q, cu_k, max_q, max_k)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide(q))
    for qs, ks in sequences(cu_q, cu_k):
        for i in range(qs.start, qs.stop):
            seen = keys_of(i, qs, ks, causal, left, right)
            if seen.start >= seen.stop:
                out[i], lse[:, i] = 0, no_keys
                continue
            scores = torch.einsum("hd,mhd->hm", q[i].to(wide(q)), per_head(k[seen], q)) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            lse[:, i] = scores.logsumexp(1)
            p = torch.exp(scores - lse[:, i : i + 1])
            out[i] = torch.einsum("hm,mhd->hd", p, per_head(v[seen], q)).to(q.dtype)
    return out, lse


def attend_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap):
    """dq, dk, dv.  Rows of sequences without a counterpart keep what memory held: nobody may look at them."""
    check(q, k, v, cu_q, cu_k, max_q, max_k)
    check(grad, out, out, cu_q, cu_q, max_q, max_q)
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0]) and q.shape == out.shape
    dq, dk, dv = (torch.full(x.shape, math.nan, dtype=x.dtype) for x in (q, k, v))
    for qs, ks in sequences(cu_q, cu_k):
        if qs.start == qs.stop or ks.start == ks.stop:
            continue
        x, g = q[qs].to(wide(q)), grad[qs].to(wide(q))
        keys, values = per_head(k[ks], q), per_head(v[ks], q)
        scores, slope = torch.einsum("nhd,mhd->hnm", x, keys) * scale, 1.0
        if softcap:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, 1 - capped**2
        seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
        for i in range(qs.start, qs.stop):
            run = keys_of(i, qs, ks, causal, left, right)
            seen[i - qs.start, run.start - ks.start : run.stop - ks.start] = True
        p = torch.exp(scores - lse[:, qs, None]).masked_fill(~seen, 0)
        delta = (g * out[qs].to(wide(q))).sum(2).T[..., None]
        ds = p * (torch.einsum("nhd,mhd->hnm", g, values) - delta) * slope * scale
        dq[qs] = torch.einsum("hnm,mhd->nhd", ds, keys).to(q.dtype)
        dk[ks] = grouped(torch.einsum("hnm,nhd->mhd", ds, x), k).to(q.dtype)
        dv[ks] = grouped(torch.einsum("hnm,nhd->mhd", p, g), k).to(q.dtype)
    return dq, dk, dv


def check(q, k, v, cu_q, cu_k, max_q, max_k):
    for x in (q, k, v):
        unit = 16 // x.element_size()
        assert x.stride(2) == 1 and x.data_ptr() % 16 == 0
        assert all(s > 0 and s % unit == 0 for s in x.stride()[:2]), "rows must start at 16 bytes"
    for cu, longest, x in ((cu_q, max_q, q), (cu_k, max_k, k)):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and cu[0] == 0 and cu[-1] == len(x)
        assert len(cu) > 1 and cu.diff().min() >= 0 and cu.diff().max() <= longest
    assert len(cu_q) == len(cu_k)
    assert max_q > 1, "single rows go to another kernel"


def sequences(cu_q, cu_k):
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        yield slice(int(a), int(b)), slice(int(c), int(d))


def keys_of(i, qs, ks, causal, left, right):
    """Aligned at the end: the last row of a causal sequence sees its last key."""
    at = ks.stop - (qs.stop - i)
    right = 0 if causal else right
    first = ks.start if left < 0 else max(ks.start, at - left)
    return slice(first, ks.stop if right < 0 else min(ks.stop, at + right + 1))


def wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def per_head(k, q):
    return k.to(wide(k)).repeat_interleave(q.shape[1] // k.shape[1], 1)


def grouped(x, k):
    return x.view(len(x), k.shape[1], -1, x.shape[2]).sum(2)


def sides(causal, left, right):
    """FlashAttention 4's windows as 2 and 3 have them; two that add up to less than 0 would be none to it."""
    assert (left is None or left >= 0) and right == (0 if causal else None), "None is all that there is"
    return (-1 if left is None else left), (-1 if right is None else right)


# fmt: off
class FlashAttention2:
    """``flash_attn.flash_attn_interface`` of flash-attn 2.8.3."""

    def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                   dropout_p, softmax_scale, causal, window_size_left=-1,
                                   window_size_right=-1, softcap=0.0, alibi_slopes=None,
                                   return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
                                   zero_tensors=False):
        CALLS.append("forward")
        assert q.shape[2] == v.shape[2]
        assert dropout_p == 0 and alibi_slopes is None
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                          causal, window_size_left, window_size_right, softcap, math.inf)
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
                                    max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                                    window_size_left, window_size_right, softcap, alibi_slopes,
                                    deterministic, rng_state=None, zero_tensors=False):
        CALLS.append("backward")
        assert deterministic and dropout_p == 0 and alibi_slopes is None
        found = attend_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, softmax_scale, causal, window_size_left, window_size_right,
                                softcap)
        for x, grad in zip((dq, dk, dv), found, strict=True):
            assert x.stride(-1) == 1
            x.copy_(grad)
        return torch.empty(0)


class FlashAttention3:
    """``flash_attn_interface`` of FlashAttention 3, hopper/."""

    def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None,
                            cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None,
                            max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
                            leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                            causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
                            softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
                            pack_gqa=None, sm_margin=0):
        CALLS.append("forward")
        assert q.shape[2] == v.shape[2]
        assert num_splits == 1
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                          causal, window_size_left, window_size_right, softcap, -math.inf)
        return out.contiguous(), lse, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None,
                             sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None,
                             dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
                             window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):
        CALLS.append("backward")
        assert deterministic
        found = attend_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, softmax_scale, is_causal, window_size_left, window_size_right,
                                softcap)
        for x, grad in zip((dq, dk, dv), found, strict=True):
            x.copy_(grad)
        return torch.empty(0)


class FlashAttention4:
    """``flash_attn.cute.interface`` of flash-attention's commit 0251105a."""

    def _flash_attn_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
                        seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
                        page_table=None, softmax_scale=None, causal=False, softcap=None,
                        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None,
                        mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1,
                        pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None,
                        return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
                        q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
                        scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False):
        CALLS.append("forward")
        assert num_splits == 1 and q.shape[2] == v.shape[2]
        left, right = sides(causal, window_size_left, window_size_right)
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                          causal, left, right, softcap, -math.inf)
        return out, lse if return_lse else None, None, None

    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
                        window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128,
                        num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False,
                        dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
                        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None,
                        seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None,
                        mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
                        dlse=None, learnable_sink=None):
        CALLS.append("backward")
        assert deterministic and dlse is None
        left, right = sides(causal, window_size_left, window_size_right)
        found = attend_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, softmax_scale, causal, left, right, softcap)
        for x, grad in zip((dq, dk, dv), found, strict=True):
            x.copy_(grad)
        return dq, dk, dv


class Aten:
    """``torch.ops.aten`` of torch 2.13."""

    def _flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                                 is_causal, return_debug_mask, scale=None, window_size_left=None,
                                 window_size_right=None, seqused_k=None, alibi_slopes=None,
                                 block_table=None, num_splits=None):
        CALLS.append("forward")
        assert query.shape[2] == value.shape[2]
        assert dropout_p == 0 and not return_debug_mask and num_splits == 1
        out, lse = attend(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal,
                          window_size_left, window_size_right, 0, math.inf)
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
                                  max_k, dropout_p, is_causal, rng_state, unused, scale=None,
                                  window_size_left=None, window_size_right=None):
        CALLS.append("backward")
        assert torch.are_deterministic_algorithms_enabled(), "its dq is added up with atomics otherwise"
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert rng_state.dtype == torch.uint64 and dropout_p == 0
        return attend_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
                               max_k, scale, is_causal, window_size_left, window_size_right, 0)
# fmt: on


MODULES = {
    "flash_attn.flash_attn_interface": FlashAttention2,
    "flash_attn_interface": FlashAttention3,
    "flash_attn.cute.interface": FlashAttention4,
    "torch": SimpleNamespace(ops=SimpleNamespace(aten=Aten)),
}
KERNELS = {
    "fa2": varlen.FlashAttention2,
    "fa3": varlen.FlashAttention3,
    "fa4": varlen.FlashAttention4,
    "aten": varlen.Aten,
}


def merge_fp64(out, lse, part, part_lse, sinks=None):
    """``attention_merge`` for the proofs in fp64: the kernels read at most fp32."""
    none = torch.full_like(lse, -math.inf)
    a, b = (none if x is None else torch.where(x == math.inf, none, x) for x in (lse, part_lse))
    sink = none if sinks is None else sinks.to(lse.dtype)[:, None].expand_as(lse)
    total = torch.stack([a, b, sink]).logsumexp(0)
    weights = ((x - total).exp().masked_fill(x == -math.inf, 0).T[..., None] for x in (a, b))
    values = out, out if part is None else part
    x, y = (torch.where(w == 0, 0, w * value) for w, value in zip(weights, values, strict=True))
    out.copy_(x + y)
    lse.copy_(total)


def reduce_fp64(k, v, index, offsets):
    """``segment_reduce``, likewise."""
    return tuple(torch.segment_reduce(x[index], "sum", offsets=offsets, axis=0) for x in (k, v))


def replace(monkeypatch, impl=flash, **kernels):
    """Others in the place of a pass's own kernels around the vendors'."""
    monkeypatch.setattr(impl, "AROUND", impl.AROUND._replace(**kernels))


def by_dtype(kernel, of_fp64):
    """``kernel``, or ``of_fp64`` where the first tensor is fp64."""
    return lambda x, *rest: (of_fp64 if x.dtype == torch.float64 else kernel)(x, *rest)


def install(name, monkeypatch, modules=MODULES):
    """The adapter ``name`` over its stand-in, on the CPU as if it were an H100, in any dtype."""
    monkeypatch.setattr(varlen, "library", lambda module: modules.get(module, f"{module} is not installed"))
    for impl in PASSES.values():
        merge, _, reduce = impl.AROUND
        of_dtype = by_dtype(merge, merge_fp64), by_dtype(reduce, reduce_fp64)
        replace(monkeypatch, impl, attention_merge=of_dtype[0], segment_reduce=of_dtype[1])
    monkeypatch.setattr(varlen, "capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "DTYPES", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
    adapter = KERNELS[name]()
    monkeypatch.setattr(varlen, "KERNELS", (adapter,))
    CALLS.clear()
    return adapter
