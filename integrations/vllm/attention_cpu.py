"""Attention with shared prefixes in vLLM's CPU backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rlkernel.integrations.vllm import attention_paged

LAYOUTS = ("vec", "vec16")
"""The instruction sets whose kernels keep keys as [head dim, tokens] and values as [tokens, head dim]."""


class Impl(attention_paged.Impl):
    paged_backend = "native"

    def paged_window(self) -> int | None:
        mine: Any = self
        return None if mine.sliding_window == -1 else mine.sliding_window

    def paged_caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.__dict__.get("_paged_caches")  # of the step before: views take longer than they should
        if seen is None or seen[0] is not kv_cache:
            blocks, heads, size, both = kv_cache.shape
            keys, values = kv_cache.view(blocks, heads, 2, -1).unbind(2)
            keys = keys.view(blocks, heads, both // 2, size).permute(0, 3, 1, 2)
            values = values.view(blocks, heads, size, both // 2).transpose(1, 2)
            seen = self.__dict__["_paged_caches"] = kv_cache, keys, values
        return seen[1], seen[2]

    def paged_refused(self, layer: Any) -> str:
        if layer.isa not in LAYOUTS:
            return f"the kernels' instruction set must be one of {', '.join(LAYOUTS)}, got {layer.isa}"
        return ""


THEIRS = {"CPU_ATTN": CPUAttentionBackend}
"""By its name in vLLM's registry."""
CPU_ATTN = attention_paged.in_front_of(CPUAttentionBackend, attention_paged.Builder, Impl)
