"""vLLM's attention backends with shared prefixes: steps that go to ``paged_prefix_attention``.

A step in which requests share leading blocks is one call of it in each layer; other steps, and layers of a
kind that is not served, run vLLM's kernel.  vLLM writes keys and values in any case.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import vllm.envs
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "attention"
ALONE = "no requests share a block"
READ, APART = "read", "read by requests by themselves"

BUILD_PARAMETERS = ("self", "common_prefix_len", "common_attn_metadata", "fast_build=False")
FORWARD_PARAMETERS = (
    "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale=None",
    "output_block_scale=None",
)  # fmt: skip

LEAST_BLOCK = 16  # of the kernels of all backends


def check(theirs: Any) -> None:
    """Raises PatchError where a backend of vLLM is not what it must be."""
    contract.checked(theirs.get_builder_cls(), "build", BUILD_PARAMETERS)
    contract.checked(theirs.get_impl_cls(), "forward", FORWARD_PARAMETERS)
    if theirs.forward_includes_kv_cache_update:
        raise PatchError(f"{theirs.__name__} must write keys and values before its forward")


def in_front_of(theirs: Any, builder: type[Builder], impl: type[Impl]) -> Any:
    """The backend of vLLM with a builder and an implementation in front of its own."""
    ours: dict[str, Any] = {
        "get_builder_cls": type("Builder", (builder, theirs.get_builder_cls()), {}),
        "get_impl_cls": type("Impl", (impl, theirs.get_impl_cls()), {}),
    }
    methods = {name: staticmethod(lambda found=found: found) for name, found in ours.items()}
    return type("Backend", (theirs,), {"__module__": impl.__module__, **methods})


class Tables(NamedTuple):
    """Of the requests of a step."""

    block_table: Tensor
    seq_lens: Tensor
    query_starts: Tensor


class Step:
    """What the layers of a step share: its tables, and a plan for each window that they have."""

    def __init__(self, common: CommonAttentionMetadata, every: bool) -> None:
        """``every``: whether a step is served in which nothing is shared."""
        self.every = every
        n, width = common.num_reqs, common.max_seq_len // LEAST_BLOCK + 1
        if reason := _refused(common, every):
            self.reason = reason
            return
        table = common.block_table_tensor[:n, :width].contiguous()
        self.tables = Tables(table, common.seq_lens[:n], common.query_start_loc[: n + 1])
        # vLLM's own copies on the host, where it has some, are bounds while drafts are being judged
        self._host = Tables(*(x.cpu() for x in self.tables))
        self.rows = int(self._host.query_starts[n])
        # no plan is made where it would be of no use, as in most steps of other work than rollouts
        alone = not every and len(self._host.block_table[:, 0].unique()) == n
        self.reason = ALONE if alone else ""
        self._plans: dict[tuple[int, int | None], rlkernel.PagedPlan] = {}

    def plan(self, block_size: int, window: int | None) -> rlkernel.PagedPlan:
        key = block_size, window
        if key not in self._plans:
            self._plans[key] = rlkernel.paged_prefix_plan(
                *self._host, block_size, window=window, device=self.tables.block_table.device
            )
        return self._plans[key]


def _refused(common: CommonAttentionMetadata, every: bool) -> str:
    if common.num_reqs < 2 and not every:
        return ALONE
    if common.causal is not True:
        return "the attention is not causal"
    if common.mm_req_doc_ranges is not None or common.rswa_prefix_lens is not None:
        return "some positions see what lies behind them, or in front of their window"
    if common.encoder_seq_lens is not None or not common.block_table_tensor.shape[1]:
        return "the layers are not a decoder's own"
    if common.dcp_local_seq_lens is not None:
        return "ranks share out the keys of a request"
    if vllm.envs.VLLM_BATCH_INVARIANT and not every:
        return "VLLM_BATCH_INVARIANT asks for the bits that requests have alone, in vLLM's kernel"
    return ""


class Builder:
    """In front of a metadata builder of vLLM."""

    supports_update_block_table = False  # a plan is of one table

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        # a draft's few layers are not worth a plan
        patch = None if fast_build else VllmPatch.in_place()
        metadata.rlkernel = patch and Step(common_attn_metadata, patch.batch_invariant)
        return metadata


class Impl(abc.ABC):
    """In front of an implementation of vLLM, whose cache is [blocks, Hkv, tokens of a block, D + D]."""

    @abc.abstractmethod
    def paged_window(self) -> int | None:
        """How many positions a row sees, itself included."""

    @abc.abstractmethod
    def paged_attend(self, query: Tensor, kv_cache: Tensor, step: Step, plan: Any, out: Tensor) -> None:
        """Writes ``out`` for the rows [T, Hq, D]; raises NotImplementedError where no kernel takes them."""

    @abc.abstractmethod
    def paged_refused(self, layer: Any) -> str:
        """Why the layer is not served, beside what is said for all implementations."""

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
            scaled = any(x is not None for x in (*scales, *options.values()))
            reason = (
                step.reason
                or self.paged_refused(layer)
                or _layer_refused(self, query, kv_cache, scaled)
                or self._served(step, query, kv_cache, output, patch)
            )
            if not reason:
                return output
            if patch.batch_invariant:
                raise RuntimeError(f"batch_invariant must have attention that is served, got {reason}")
            patch.left(NAME, reason, quiet=reason == ALONE)
        return super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options
        )

    def _served(self, step: Step, query: Tensor, kv_cache: Tensor, output: Tensor, patch: VllmPatch) -> str:
        """Writes the output, or says why not."""
        mine: Any = self
        _, heads, block_size, both = kv_cache.shape
        plan = step.plan(block_size, self.paged_window())
        if plan.keys_read >= plan.keys_apart and not step.every:
            return ALONE
        shape = step.rows, mine.num_heads, mine.head_size
        # a view takes as long as a kernel of few keys
        rows, out = (x if x.shape == shape else x[: step.rows].view(shape) for x in (query, output))
        try:
            self.paged_attend(rows, kv_cache, step, plan, out)
        except NotImplementedError as error:
            return str(error).splitlines()[-1].strip()
        token_bytes = heads * both * kv_cache.element_size()
        patch.count(patch.calls, NAME)
        patch.bytes[READ] += plan.keys_read * token_bytes
        patch.bytes[APART] += plan.keys_apart * token_bytes
        return ""


def _layer_refused(impl: Any, query: Tensor, kv_cache: Tensor, scaled: bool) -> str:
    if impl.attn_type != AttentionType.DECODER:
        return "the layers are not a decoder's own"
    if impl.alibi_slopes is not None:
        return "ALiBi"
    if kv_cache.dtype != query.dtype or kv_cache.shape[3] != 2 * impl.head_size:
        return "the cache is quantised"
    return "the output is quantised" if scaled else ""
