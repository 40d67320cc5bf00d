"""Attention with shared prefixes on GPUs: vLLM's backends, with steps that go to ``paged_prefix_attention``.

A step in which requests share leading blocks is one call of it in each layer; other steps, and layers of a
kind that is not served, run vLLM's kernel.  vLLM writes keys and values in any case.  The plan is made on the
host, from tables that are copied there, which is a synchronisation; and its launches are of this step alone,
so that no CUDA graph may hold them.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import vllm.envs
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.attention import (
    ALONE,
    APART,
    BUILD_PARAMETERS,
    FORWARD_PARAMETERS,
    NAME,
    READ,
    register,
)
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

MODULES = {  # members of vLLM's registry, and the modules whose Backend takes their place
    "TRITON_ATTN": "rlkernel.integrations.vllm.attention_triton",
    "FLASH_ATTN": "rlkernel.integrations.vllm.attention_flash",
}
LEAST_BLOCK = 16  # of both backends' kernels


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    for path in MODULES.values():
        theirs = importlib.import_module(path).THEIRS
        contract.checked(theirs.get_builder_cls(), "build", BUILD_PARAMETERS)
        contract.checked(theirs.get_impl_cls(), "forward", FORWARD_PARAMETERS)
        if theirs.forward_includes_kv_cache_update:
            raise PatchError(f"{theirs.__name__} must write keys and values before its forward")
    register(patch, {name: f"{path}.Backend" for name, path in MODULES.items()})


class Tables(NamedTuple):
    """Of the requests of a step."""

    block_table: Tensor
    seq_lens: Tensor
    query_starts: Tensor


class Step:
    """What the layers of a step share: its tables, and a plan for each window that they have."""

    def __init__(self, common: CommonAttentionMetadata) -> None:
        n, width = common.num_reqs, common.max_seq_len // LEAST_BLOCK + 1
        if reason := _refused(common):
            self.reason = reason
            return
        table = common.block_table_tensor[:n, :width].contiguous()
        self.tables = Tables(table, common.seq_lens[:n], common.query_start_loc[: n + 1])
        # vLLM's own copies on the host, where it has some, are bounds while drafts are being judged
        self._host = Tables(*(x.cpu() for x in self.tables))
        self.rows = int(self._host.query_starts[n])
        # no plan is made where it would be of no use, as in most steps of other work than rollouts
        self.reason = ALONE if len(self._host.block_table[:, 0].unique()) == n else ""
        self._plans: dict[tuple[int, int | None], rlkernel.PagedPlan] = {}

    def plan(self, block_size: int, window: int | None) -> rlkernel.PagedPlan:
        key = block_size, window
        if key not in self._plans:
            self._plans[key] = rlkernel.paged_prefix_plan(
                *self._host, block_size, window=window, device=self.tables.block_table.device
            )
        return self._plans[key]


def _refused(common: CommonAttentionMetadata) -> str:
    if common.num_reqs < 2:
        return ALONE
    if common.causal is not True:
        return "the attention is not causal"
    if common.mm_req_doc_ranges is not None or common.rswa_prefix_lens is not None:
        return "some positions see what lies behind them, or in front of their window"
    if common.encoder_seq_lens is not None:
        return "the layers are not a decoder's own"
    if common.dcp_local_seq_lens is not None:
        return "ranks share out the keys of a request"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT asks for the bits that requests have alone, in vLLM's kernel"
    return ""


class Builder:
    """In front of a metadata builder of vLLM."""

    supports_update_block_table = False  # a plan is of one table
    supports_draft_decode_metadata_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_draft_decode_metadata_update = False  # which theirs may have set

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        # a draft's few layers are not worth a plan
        metadata.rlkernel = None if fast_build else Step(common_attn_metadata)
        return metadata


class Impl:
    """In front of an implementation of vLLM, whose cache is [blocks, Hkv, tokens of a block, D + D]."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **options: Any,
    ) -> Tensor:
        step, patch = getattr(attn_metadata, "rlkernel", None), VllmPatch.in_place()
        if step is not None and patch is not None:  # neither warming up nor undone
            reason = step.reason or self._served(
                step, query, kv_cache, output, (*scales, *options.values()), patch
            )
            if not reason:
                return output
            patch.left(NAME, reason, quiet=reason == ALONE)
        return super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options
        )

    def _served(
        self,
        step: Step,
        query: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        scales: tuple[Any, ...],
        patch: VllmPatch,
    ) -> str:
        """Writes the output, or says why not."""
        mine: Any = self
        if reason := _layer_refused(mine, query, kv_cache, scales):
            return reason
        window = mine.sliding_window[0] + 1 or None
        plan = step.plan(kv_cache.shape[2], window)
        if plan.keys_read >= plan.keys_apart:
            return ALONE
        key_cache, value_cache = kv_cache.transpose(1, 2).split(mine.head_size, dim=-1)
        rows = query[: step.rows].view(-1, mine.num_heads, mine.head_size)
        try:
            with rlkernel.use_backend("triton"):  # the reference would be slower than vLLM's kernel
                found = rlkernel.paged_prefix_attention(
                    rows, key_cache, value_cache, *step.tables, scale=mine.scale, window=window,
                    softcap=mine.logits_soft_cap or None, sinks=mine.sinks, plan=plan,
                )  # fmt: skip
        except NotImplementedError as error:
            return str(error).splitlines()[-1].strip()
        assert isinstance(found, Tensor)
        output[: step.rows] = found.view(-1, *output.shape[1:])
        token_bytes = kv_cache.shape[1] * kv_cache.shape[3] * kv_cache.element_size()
        patch.count(patch.calls, NAME)
        patch.bytes[READ] += plan.keys_read * token_bytes
        patch.bytes[APART] += plan.keys_apart * token_bytes
        return ""


def _layer_refused(impl: Any, query: Tensor, kv_cache: Tensor, scales: tuple[Any, ...]) -> str:
    if impl.attn_type != AttentionType.DECODER:
        return "the layers are not a decoder's own"
    if impl.alibi_slopes is not None:
        return "ALiBi"
    if kv_cache.dtype != query.dtype or kv_cache.shape[3] != 2 * impl.head_size:
        return "the cache is quantised"
    if any(x is not None for x in scales):
        return "the output is quantised"
    if getattr(impl, "chunk_lookback", -1) != -1:
        return "the attention is local to chunks"
    return ""
