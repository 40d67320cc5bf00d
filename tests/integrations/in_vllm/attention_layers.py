"""Layers of vLLM's attention backends, and the metadata of steps that they are given, without an engine."""

import itertools
import math

import torch

BLOCK, WIDTH = 16, 6
PROMPT = 2 * 64 + 9  # keys of the group's prompt, of which 128 stand in whole tiles
OWN = (5, 1, 22)  # of each of the group
ALONE = 70


def step(rows, block=BLOCK):
    """Three requests behind a prompt, and one between them that shares nothing: vLLM's metadata of a step."""
    blocks, lens, tables = itertools.count(1), [], []
    prompt = [next(blocks) for _ in range(PROMPT // block)]
    for own in (OWN[0], ALONE, *OWN[1:]):
        shared = [] if own == ALONE else prompt
        lens.append(own + (PROMPT if shared else 0))
        table = shared + [next(blocks) for _ in range(-(-lens[-1] // block) - len(shared))]
        tables.append(table + [0] * (WIDTH * 2 - len(table)))
    return next(blocks), common(rows, lens, torch.tensor(tables, dtype=torch.int32))


def common(rows, lens, table):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
    )


def request(of, i, rows):
    """The metadata of a step of one request: the i-th of a step, asked for its last rows alone."""
    return common([rows], of.seq_lens[i : i + 1].tolist(), of.block_table_tensor[i : i + 1])


class Layer(torch.nn.Module):
    _k_scale = _v_scale = _q_scale = torch.ones(())
    _k_scale_float = _v_scale_float = 1.0


class Layers:
    """Of a model's heads."""

    def __init__(self, model, block=BLOCK, dtype=torch.float32):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.config = EngineArgs(
            model=model, max_model_len=256, block_size=block, dtype=dtype, enforce_eager=True
        ).create_engine_config()
        found, parallel = self.config.model_config, self.config.parallel_config
        self.heads, self.kv_heads = found.get_num_attention_heads(parallel), found.get_num_kv_heads(parallel)
        self.dim = found.get_head_size()
        self.spec = FullAttentionSpec(
            block_size=block, num_kv_heads=self.kv_heads, head_size=self.dim, dtype=dtype
        )

    def builder(self, backend):
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            return backend.get_builder_cls()(self.spec, ["layer"], self.config, torch.device("cpu"))

    def attended(self, backend, common, cache, query, scales=(), **layer):
        from vllm.config import set_current_vllm_config

        builder, given = self.builder(backend), Layer()
        given.isa = getattr(builder, "isa", None)
        with set_current_vllm_config(self.config):
            options = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | layer
            impl = backend.get_impl_cls()(self.heads, self.dim, self.dim**-0.5, self.kv_heads, **options)
        metadata = builder.build(0, common)
        out = torch.full((common.num_actual_tokens, self.heads, self.dim), math.nan, dtype=query.dtype)
        impl.forward(given, query, None, None, cache, metadata, out, *scales)
        return out
