"""vLLM's Triton backend with shared prefixes."""

from __future__ import annotations

from vllm.v1.attention.backends import triton_attn

from rlkernel.integrations.vllm import attention_gpu

THEIRS = triton_attn.TritonAttentionBackend


class Builder(attention_gpu.Builder, triton_attn.TritonAttentionMetadataBuilder):
    pass


class Impl(attention_gpu.Impl, triton_attn.TritonAttentionImpl):
    pass


class Backend(triton_attn.TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
