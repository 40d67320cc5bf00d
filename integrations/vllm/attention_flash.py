"""vLLM's FlashAttention backend with shared prefixes."""

from __future__ import annotations

from vllm.v1.attention.backends import flash_attn

from rlkernel.integrations.vllm import attention_gpu

THEIRS = flash_attn.FlashAttentionBackend


class Builder(attention_gpu.Builder, flash_attn.FlashAttentionMetadataBuilder):
    pass


class Impl(attention_gpu.Impl, flash_attn.FlashAttentionImpl):
    pass


class Backend(flash_attn.FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
