"""Attention with shared prefixes in vLLM's CPU backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rlkernel.calls.paged_prefix_attention import PagedCall
from rlkernel.integrations.vllm import attention_paged
from rlkernel.integrations.vllm.attention_paged import Step
from rlkernel.native import paged_prefix_attention as native
from rlkernel.ops.paged_prefix_attention import rule_of

LAYOUTS = ("vec", "vec16")
"""The instruction sets whose kernels keep keys as [head dim, tokens] and values as [tokens, head dim]."""


class Impl(attention_paged.Impl):
    def paged_window(self) -> int | None:
        mine: Any = self
        return None if mine.sliding_window == -1 else mine.sliding_window

    def paged_attend(self, query: Tensor, kv_cache: Tensor, step: Step, plan: Any, out: Tensor) -> None:
        """What the op does with arguments that are right: to look at them in each layer takes longer than to
        decode."""
        mine: Any = self
        if reasons := native.unsupported(query):
            raise NotImplementedError("; ".join(reasons))
        query = query if query.stride(2) == 1 else query.contiguous()
        rule = rule_of(mine.head_size, mine.scale, mine.logits_soft_cap or None, self.paged_window())
        call = PagedCall(query, *self._caches(kv_cache), *step.tables, plan, rule, mine.sinks)
        native.attend(call, out)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [blocks, tokens of a block, Hkv, D] both."""
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
