"""Attention with shared prefixes in vLLM's Triton and FlashAttention backends.

The plan is made on the host, from tables that are copied there, which is a synchronisation; and its launches
are of one step alone, so that no CUDA graph may hold them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

import rlkernel
from rlkernel.integrations.vllm import attention_paged
from rlkernel.integrations.vllm.attention_paged import Step


class Builder(attention_paged.Builder):
    supports_draft_decode_metadata_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_draft_decode_metadata_update = False  # which theirs may have set

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER


class Impl(attention_paged.Impl):
    def paged_window(self) -> int | None:
        mine: Any = self
        return mine.sliding_window[0] + 1 or None

    def paged_attend(self, query: Tensor, kv_cache: Tensor, step: Step, plan: Any, out: Tensor) -> None:
        mine: Any = self
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        with rlkernel.use_backend("triton"):  # the reference would be slower than vLLM's kernel
            found = rlkernel.paged_prefix_attention(
                query, keys, values, *step.tables, scale=mine.scale, window=self.paged_window(),
                softcap=mine.logits_soft_cap or None, sinks=mine.sinks, plan=plan,
            )  # fmt: skip
        assert isinstance(found, Tensor)
        out.copy_(found)

    def paged_refused(self, layer: Any) -> str:
        return "the attention is local to chunks" if getattr(self, "chunk_lookback", -1) != -1 else ""


THEIRS = {"TRITON_ATTN": TritonAttentionBackend, "FLASH_ATTN": FlashAttentionBackend}
"""By their names in vLLM's registry."""
TRITON_ATTN, FLASH_ATTN = (attention_paged.in_front_of(x, Builder, Impl) for x in THEIRS.values())
