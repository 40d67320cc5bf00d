"""A process in which attention of vLLM's GPU backends runs, interpreted, beside vLLM's own Triton kernel."""

import itertools
import math
import sys

import torch
import triton
import triton.language as tl
import vllm.triton_utils

import rlkernel

BLOCK, WIDTH = 16, 6
PROMPT = 2 * 64 + 9  # keys of the group's prompt, of which 128 stand in whole tiles
OWN = (5, 1, 22)  # of each of the group
ALONE = 70


def step(rows, seed=0):
    """Three requests behind a prompt, and one between them that shares nothing: vLLM's metadata of a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    blocks, lens, tables = itertools.count(1), [], []
    prompt = [next(blocks) for _ in range(PROMPT // BLOCK)]
    for own in (OWN[0], ALONE, *OWN[1:]):
        shared = [] if own == ALONE else prompt
        lens.append(own + (PROMPT if shared else 0))
        table = shared + [next(blocks) for _ in range(-(-lens[-1] // BLOCK) - len(shared))]
        tables.append(table + [0] * (WIDTH * 2 - len(table)))
    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    return next(blocks), CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(lens),
        block_table_tensor=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
    )


class Layer(torch.nn.Module):
    _k_scale = _v_scale = _q_scale = torch.ones(())


def main(model):
    # vLLM sees no GPU, and has names without a meaning in Triton's place
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends import registry, triton_attn
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from rlkernel.integrations.vllm import attention_gpu
    from rlkernel.integrations.vllm.vllm_patch import VllmPatch
    from rlkernel.triton_ops import paged_prefix_attention as triton_op

    config = EngineArgs(
        model=model, max_model_len=256, block_size=BLOCK, dtype="float32", enforce_eager=True
    ).create_engine_config()
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    kv_heads = config.model_config.get_num_kv_heads(config.parallel_config)
    dim = config.model_config.get_head_size()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=dim, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    sinks = torch.linspace(-1, 2, heads)

    def attended(backend, common, cache, query, scales=(), **layer):
        with set_current_vllm_config(config):
            builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
            given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | layer
            impl = backend.get_impl_cls()(heads, dim, dim**-0.5, kv_heads, **given)
            metadata = builder.build(0, common)
        out = torch.full((common.num_actual_tokens, heads, dim), math.nan)
        impl.forward(Layer(), query, None, None, cache, metadata, out, *scales)
        return out

    stock = triton_attn.TritonAttentionBackend
    patch = VllmPatch(("attention",), True)
    with patch.planning("attention"):
        attention_gpu.plan(patch)
    with patch.apply():
        backends = {name: registry.AttentionBackendEnum[name].get_class() for name in attention_gpu.MODULES}
        assert all(
            b.get_name() == name and b.__module__.startswith("rlkernel") for name, b in backends.items()
        )
        served = 0
        for rows in ((1, 1, 1, 1), (3, 9, 1, 7)):
            blocks, common = step(rows)
            cache = torch.randn(blocks, BLOCK, kv_heads, 2 * dim, generator=draw).transpose(1, 2)
            query = torch.randn(sum(rows), heads, dim, generator=draw)
            for layer in ({}, {"sliding_window": 100}, {"logits_soft_cap": 2.0}, {"sinks": sinks}):
                want = attended(stock, common, cache, query, **layer)
                ours = ("TRITON_ATTN",) if "sinks" in layer else tuple(backends)  # theirs asks for a GPU then
                for name in ours:
                    got = attended(backends[name], common, cache, query, **layer)
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                    served += 1
            if len(set(rows)) == 1:
                read, apart = (patch.bytes[k] for k in (attention_gpu.READ, attention_gpu.APART))
                assert 0 < 1.5 * read < apart, (read, apart)
        assert patch.calls == {"attention": served} and not patch.fallbacks, (patch.calls, patch.fallbacks)

        # what is left to vLLM
        want = attended(stock, common, cache, query, alibi_slopes=[0.1] * heads)
        got = attended(backends["TRITON_ATTN"], common, cache, query, alibi_slopes=[0.1] * heads)
        assert torch.equal(got, want) and patch.fallbacks == {"attention: ALiBi": 1}
        apart = common.replace(block_table_tensor=torch.arange(4 * 2 * WIDTH).view(4, -1).int() % blocks)
        apart.block_table_tensor[:, 0] = torch.arange(4)
        want = attended(stock, apart, cache, query)
        assert torch.equal(attended(backends["TRITON_ATTN"], apart, cache, query), want)
        assert patch.fallbacks[f"attention: {attention_gpu.ALONE}"] == 1
        triton_op.MAX_HEAD_DIM = 8
        assert torch.equal(
            attended(backends["TRITON_ATTN"], common, cache, query), attended(stock, common, cache, query)
        )
        assert any("triton: the head dim of key_cache must be at most 8" in x for x in patch.fallbacks)
        for field in ({"causal": False}, {"num_reqs": 1}, {"rswa_prefix_lens": common.seq_lens}):
            assert attention_gpu.Step(common.replace(**field)).reason
        with set_current_vllm_config(config):
            builder = backends["FLASH_ATTN"].get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        assert not builder.supports_update_block_table and not builder.supports_draft_decode_metadata_update
        assert builder.get_cudagraph_support(config, spec).name == "NEVER"
        assert builder.build(0, common, fast_build=True).rlkernel is None
        assert rlkernel.last_backend("paged_prefix_attention") == "triton"
    assert registry.AttentionBackendEnum.TRITON_ATTN.get_class() is stock
    print("the same")


if __name__ == "__main__":
    main(sys.argv[1])
