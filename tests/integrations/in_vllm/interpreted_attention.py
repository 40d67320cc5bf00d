"""A process in which attention of vLLM's GPU backends runs, interpreted, beside vLLM's own Triton kernel."""

import sys

import attention_layers
import torch
import triton
import triton.language as tl
import vllm.triton_utils

import rlkernel


def main(model):
    # vLLM sees no GPU, and has names without a meaning in Triton's place
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
    from vllm.v1.attention.backends import registry, triton_attn

    from rlkernel.integrations.vllm import attention, attention_gpu, attention_paged
    from rlkernel.integrations.vllm.vllm_patch import VllmPatch
    from rlkernel.triton_ops import paged_prefix_attention as triton_op

    layers = attention_layers.Layers(model)
    attended, heads = layers.attended, layers.heads
    draw = torch.Generator().manual_seed(0)
    sinks = torch.linspace(-1, 2, heads)

    stock = triton_attn.TritonAttentionBackend
    patch = VllmPatch(("attention",), True)
    with patch.planning("attention"):
        attention.replace(patch, attention_gpu)
    with patch.apply():
        backends = {name: registry.AttentionBackendEnum[name].get_class() for name in attention_gpu.THEIRS}
        assert all(
            b.get_name() == name and b.__module__.startswith("rlkernel") for name, b in backends.items()
        )
        served = 0
        for rows in ((1, 1, 1, 1), (3, 9, 1, 7)):
            blocks, common = attention_layers.step(rows)
            size = blocks, attention_layers.BLOCK, layers.kv_heads, 2 * layers.dim
            cache = torch.randn(*size, generator=draw).transpose(1, 2)
            query = torch.randn(sum(rows), heads, layers.dim, generator=draw)
            for layer in ({}, {"sliding_window": 100}, {"logits_soft_cap": 2.0}, {"sinks": sinks}):
                want = attended(stock, common, cache, query, **layer)
                ours = ("TRITON_ATTN",) if "sinks" in layer else tuple(backends)  # theirs asks for a GPU then
                for name in ours:
                    got = attended(backends[name], common, cache, query, **layer)
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                    served += 1
            if len(set(rows)) == 1:
                read, apart = (patch.bytes[k] for k in (attention_paged.READ, attention_paged.APART))
                assert 0 < 1.5 * read < apart, (read, apart)
        assert patch.calls == {"attention": served} and not patch.fallbacks, (patch.calls, patch.fallbacks)

        # what is left to vLLM
        want = attended(stock, common, cache, query, alibi_slopes=[0.1] * heads)
        got = attended(backends["TRITON_ATTN"], common, cache, query, alibi_slopes=[0.1] * heads)
        assert torch.equal(got, want) and patch.fallbacks == {"attention: ALiBi": 1}
        table = torch.arange(4 * 2 * attention_layers.WIDTH).view(4, -1).int() % blocks
        table[:, 0] = torch.arange(4)
        apart = common.replace(block_table_tensor=table)
        want = attended(stock, apart, cache, query)
        assert torch.equal(attended(backends["TRITON_ATTN"], apart, cache, query), want)
        assert patch.fallbacks[f"attention: {attention_paged.ALONE}"] == 1
        triton_op.MAX_HEAD_DIM = 8
        assert torch.equal(
            attended(backends["TRITON_ATTN"], common, cache, query), attended(stock, common, cache, query)
        )
        assert any("triton: the head dim of key_cache must be at most 8" in x for x in patch.fallbacks)
        for field in ({"causal": False}, {"num_reqs": 1}, {"rswa_prefix_lens": common.seq_lens}):
            assert attention_paged.Step(common.replace(**field), every=False).reason
        builder = layers.builder(backends["FLASH_ATTN"])
        assert not builder.supports_update_block_table and not builder.supports_draft_decode_metadata_update
        assert builder.get_cudagraph_support(layers.config, layers.spec).name == "NEVER"
        assert builder.build(0, common, fast_build=True).rlkernel is None
        assert rlkernel.last_backend("paged_prefix_attention") == "triton"
    assert registry.AttentionBackendEnum.TRITON_ATTN.get_class() is stock
    print("the same")


if __name__ == "__main__":
    main(sys.argv[1])
