"""vLLM's CPU attention with shared prefixes: requests that begin with the same blocks read those once.

vLLM's registry gives this backend to every layer of a decoder.  A step in which no requests share a block,
and a layer of a kind that is not served, run vLLM's kernel as they would without it; so do the requests of a
step that share nothing with the others.  Keys and values are written by vLLM in any case.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.integrations.vllm.attention import ALONE, APART, NAME, READ
from rlkernel.integrations.vllm.attention_pages import Pages, attend
from rlkernel.integrations.vllm.attention_plan import SharedPlan
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

LAYOUTS = ("vec", "vec16")
"""The instruction sets whose kernels keep keys as [head dim, tokens] and values as [tokens, head dim]."""


@dataclasses.dataclass
class Metadata(CPUAttentionMetadata):
    """vLLM's for the whole step, with what the requests that share blocks make of it."""

    plan: SharedPlan | None = None
    alone: CPUAttentionMetadata | None = None  # of the requests that share nothing, None without any
    alone_rows: Tensor | None = None
    reason: str = ""  # why none was made


class Builder(CPUAttentionMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        result = Metadata(**{f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)})
        result.reason = self._refused(whole)
        if result.reason:
            return result
        n = common.num_reqs
        starts, lengths = common.query_start_loc[: n + 1].tolist(), common.seq_lens[:n].tolist()
        result.plan = SharedPlan.of(common.block_table_tensor[:n], starts, lengths, self.block_size)
        if result.plan is not None and len(result.plan.requests) < n:
            shared = set(result.plan.requests)
            self._leave(result, common, [i for i in range(n) if i not in shared], starts)
        return result

    def _refused(self, whole: CPUAttentionMetadata) -> str:
        if self.isa not in LAYOUTS:
            return f"the kernels' instruction set must be one of {', '.join(LAYOUTS)}, got {self.isa}"
        if self.is_cross_attention or self.is_encoder_only_attention:
            return "the layers are not a decoder's own"
        if whole.causal is not True or whole.dynamic_causal is not None:
            return "the attention is not causal"
        return ""

    def _leave(
        self, result: Metadata, common: CommonAttentionMetadata, requests: list[int], starts: list[int]
    ) -> None:
        """A step of its own, for vLLM's kernel, of the requests that share nothing."""
        asked = [starts[i + 1] - starts[i] for i in requests]
        dtype = common.query_start_loc.dtype
        query_starts = torch.tensor([0, *itertools.accumulate(asked)], dtype=dtype)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in requests])
        seq_lens = common.seq_lens[requests]
        alone = dataclasses.replace(
            common,
            num_reqs=len(requests),
            num_actual_tokens=len(rows),
            max_query_len=max(asked),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=query_starts,
            query_start_loc_cpu=query_starts,
            seq_lens=seq_lens,
            block_table_tensor=common.block_table_tensor[requests],
            slot_mapping=common.slot_mapping[rows],
        )
        result.alone, result.alone_rows = super().build(0, alone), rows


class Impl(CPUAttentionBackendImpl):
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *scales: Any,
        **options: Any,
    ) -> Tensor:
        meta, patch = attn_metadata, VllmPatch.in_place()
        if isinstance(meta, Metadata) and patch is not None:  # neither warming up nor undone
            reason = meta.reason or self._refused(meta.plan, kv_cache, scales, options)
            if not reason:
                self._shared(layer, query, key, value, kv_cache, meta, output, patch)
                return output
            patch.left(NAME, reason, quiet=reason == ALONE)
        return super().forward(layer, query, key, value, kv_cache, meta, output, *scales, **options)

    def _shared(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        meta: Metadata,
        output: Tensor,
        patch: VllmPatch,
    ) -> None:
        plan = meta.plan
        assert plan is not None
        if meta.alone is not None:
            rows, n = meta.alone_rows, meta.alone.num_actual_tokens
            own = torch.empty_like(output[:n])
            super().forward(layer, query[rows], key[:n], value[:n], kv_cache, meta.alone, own)
            output[rows] = own
        window = 0 if self.sliding_window == -1 else self.sliding_window
        rule = AttentionRule(self.scale, float(self.logits_soft_cap), window, False)
        pages = Pages(kv_cache)
        found = attend(query, pages, plan, rule, self.sinks)
        output.view(-1, *found.shape[1:])[plan.rows] = found.to(output.dtype)
        work = plan.window(window)
        patch.count(patch.calls, NAME)
        patch.bytes[READ] += work.read * pages.token_bytes
        patch.bytes[APART] += work.apart * pages.token_bytes

    def _refused(
        self, plan: SharedPlan | None, kv_cache: Tensor, scales: tuple[Any, ...], options: dict[str, Any]
    ) -> str:
        if plan is None:
            return ALONE
        if kv_cache.shape[2] != plan.block_size:
            return "the cache has blocks of another size than the step's table"
        if not kv_cache.is_contiguous():
            return "the cache is not dense"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.is_fp8_kv_cache:
            return "the cache is quantised"
        if self.attn_type != AttentionType.DECODER:
            return "the layers are not a decoder's own"
        if any(x is not None for x in (*scales, *options.values())):
            return "the output is quantised"
        return ""


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
