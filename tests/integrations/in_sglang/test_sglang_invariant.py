"""Two programs, one number: what SGLang's engine reports of a token is what transformers computes of it."""

import types

import generated
import invariant_models
import pytest
import torch
import transformers
from bitwise import assert_equal
from invariant_models import Sample
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.layernorm import Gemma3RMSNorm, RMSNorm
from sglang.srt.layers.moe import fused_moe_native, topk
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models import gemma3_causal
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3_moe import modeling_qwen3_moe

import rlkernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEW = 16


def reported(outputs, asked):
    """Of the tokens that were drawn, and of those of the prompts behind their first."""
    drawn, given = [], []
    for prompt, output in zip(asked, outputs, strict=True):
        about = output["meta_info"]
        drawn.append(Sample(prompt, output["output_ids"], [x[0] for x in about["output_token_logprobs"]]))
        if len(prompt) > 1:
            values = [x[0] for x in about["input_token_logprobs"][1:]]
            given.append(Sample(prompt[:1], prompt[1:], values))
    return drawn, given


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("Qwen3", "bfloat16"), ("Llama", "float16"), ("Qwen2", "float32"), ("Mistral", "float16"),
     ("Gemma3", "bfloat16"), ("Qwen3Moe", "bfloat16")],
)  # fmt: skip
def test_an_engine_reports_what_transformers_computes(tmp_path, family, dtype):
    """With prefills in chunks beside others' steps, prefixes from the cache, and with Gemma 3's windows."""
    kind = getattr(torch, dtype)
    path = invariant_models.saved(tmp_path, family, kind)
    asked = [prompt for prompt in invariant_models.prompts() for _ in range(2)]
    request = {
        "input_ids": asked,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": NEW, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": [0, -1] * (len(asked) // 2),  # of others the cache is read
    }
    engine = {"dtype": dtype, "chunked_prefill_size": 48, "max_running_requests": 6}
    outputs, text = generated.run_forked(path, request, patch={"batch_invariant": True}, engine=engine)
    assert outputs, text[-5000:]
    assert "to SGLang" not in text
    drawn, given = reported(outputs, asked)
    model = invariant_models.loaded(path, kind)
    found = invariant_models.differences(model, drawn)
    assert len(found) == len(asked) * NEW and found.max() == 0, f"{int((found > 0).sum())} differ"
    assert invariant_models.differences(model, given[::2]).max() == 0
    assert invariant_models.differences(model, drawn, mode=False).max() > 0


# -- layers


def norm(dtype):
    torch.manual_seed(0)
    layer = RMSNorm(256, eps=1e-6)
    layer.weight.data = (torch.randn(256) * 0.2 + 1).to(dtype)
    return layer, torch.randn(7, 256).to(dtype), torch.randn(7, 256).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_rounds_as_transformers_does(invariant, dtype):
    layer, x, residual = norm(dtype)
    summed = x + residual
    wide = summed.float()
    want = layer.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    found, kept = layer(x, residual)
    assert_equal("normed", found, want)
    assert_equal("residual", kept, summed)
    assert_equal("without a residual", layer(summed), want)
    with pytest.raises(RuntimeError, match="must have norms of x and a residual, got further operands"):
        layer(x, residual, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemmas_layers_round_as_transformers_does(invariant, dtype):
    torch.manual_seed(3)
    x, residual = (torch.randn(7, 256).to(dtype) for _ in range(2))
    layer, stock = Gemma3RMSNorm(256), modeling_gemma3.Gemma3RMSNorm(256)
    layer.weight.data = stock.weight.data = (torch.randn(256) * 0.2).to(dtype)
    found, kept = layer(x, residual)
    assert_equal("normed", found, stock(x + residual))
    assert_equal("residual", kept, x + residual)
    assert_equal("without a residual", layer(x), stock(x))
    gate, up = x.chunk(2, -1)
    for approximate in ("tanh", "none"):
        want = torch.nn.functional.gelu(gate, approximate=approximate) * up
        assert_equal(f"gelu, {approximate}", GeluAndMul(approximate)(x), want)
    scale = 3072**0.5
    scaled, embedding = (
        kind(32, 64, 0, embed_scale=scale)
        for kind in (
            gemma3_causal.Gemma3TextScaledWordEmbedding,
            modeling_gemma3.Gemma3TextScaledWordEmbedding,
        )
    )
    scaled.weight.data = embedding.weight.data = torch.randn(32, 64).to(dtype)
    ids = torch.tensor([5, 0, 31])
    assert_equal("embedding", scaled(ids), embedding(ids))
    q, k, angles = torch.randn(7, 4, 64), torch.randn(7, 1, 64), torch.randn(7, 32).repeat(1, 2)
    q, k, cos, sin = (t.to(dtype) for t in (q, k, angles.cos(), angles.sin()))
    wanted = modeling_gemma3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    for found, want in zip(gemma3_causal.apply_rotary_pos_emb(q, k, cos, sin), wanted, strict=True):
        assert_equal("rotary", found, want)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_transformers_eager_ones(invariant, dtype, renormalize):
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=renormalize, experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(4)
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.3)
    block.to(dtype)
    x = torch.randn(9, 64).to(dtype)
    want = block(x[None])[0]
    logits, experts = torch.nn.functional.linear(x, block.gate.weight), block.experts
    for route in (topk.fused_topk, topk.fused_topk_native):
        weights, ids = route(hidden_states=x, gating_output=logits, topk=3, renormalize=renormalize)
        layer = types.SimpleNamespace(w13_weight=experts.gate_up_proj, w2_weight=experts.down_proj)
        output = topk.StandardTopKOutput(weights, ids, logits)
        assert_equal("experts", fused_moe_native.moe_forward_native(layer, x, output, None), want)
    for other in ({"scoring_func": "sigmoid"}, {"correction_bias": torch.randn(8)}):
        given = {"hidden_states": x, "gating_output": logits, "topk": 3, "renormalize": renormalize} | other
        found = topk.fused_topk_native(**given)
        for ours, stock in zip(found, topk.fused_topk_torch_native(**given), strict=True):
            assert_equal("SGLang's own", ours, stock)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_rotary_embeddings_round_as_transformers_does(invariant, dtype):
    torch.manual_seed(1)
    x = torch.randn(5, 128).to(dtype)
    gate, up = x.chunk(2, -1)
    assert_equal("silu", SiluAndMul()(x), torch.nn.functional.silu(gate) * up)
    rotary = RotaryEmbedding(64, 64, 32, 10000, True, dtype)
    packed = torch.randn(5, 64 * 8).to(dtype)
    before = packed.clone()
    q, k, _ = packed.split([256, 128, 128], dim=-1)
    positions = torch.tensor([0, 31, 4, 4, 9])
    cos, sin = (table.repeat(1, 2)[:, None] for table in rotary.cos_sin_cache[positions].chunk(2, -1))
    for turned, given in zip(rotary(positions, q, k), (q, k), strict=True):
        heads = given.view(5, -1, 64)
        first, second = heads.chunk(2, -1)
        want = heads * cos + torch.cat((-second, first), -1) * sin
        assert_equal("rotary", turned.view(heads.shape), want)
    assert_equal("what was turned stays", packed, before)


def cached(dtype, lengths):
    """Keys and values of requests, scattered over a cache by the table that SGLang keeps."""
    torch.manual_seed(2)
    cache = [torch.randn(200, 2, 64).to(dtype) for _ in range(2)]
    table = torch.randperm(200)[: sum(lengths)].to(torch.int32).split(lengths)
    slots = torch.zeros(len(lengths) + 2, max(lengths), dtype=torch.int32)
    requests = torch.arange(len(lengths)) + 1
    for request, own in zip(requests, table, strict=True):
        slots[request, : len(own)] = own
    return *cache, slots, requests, torch.tensor(lengths)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_bits_of_whole_sequences(invariant, dtype, window):
    lengths, rows = [40, 1, 9], torch.tensor([3, 1, 9])
    keys, values, *tables = cached(dtype, lengths)
    backend = object.__new__(TorchNativeAttnBackend)
    queries = [torch.randn(n, 4, 64).to(dtype) for n in lengths]
    options = {"scaling": 0.11, "sliding_window_size": window, "causal": True}
    last = torch.cat([q[-n:] for q, n in zip(queries, rows.tolist(), strict=True)])
    found = backend._run_sdpa_forward_extend(
        last,
        torch.empty_like(last),
        keys,
        values,
        *tables,
        tables[2] - rows,
        rows,
        enable_gqa=True,
        **options,
    )
    ones = torch.cat([q[-1:] for q in queries])
    step = backend._run_sdpa_forward_decode(
        ones, torch.empty_like(ones), keys, values, *tables, enable_gqa=True, **options
    )
    slots, requests, _ = tables
    for i, (q, n) in enumerate(zip(queries, lengths, strict=True)):
        own = slots[requests[i], :n].long()
        seen = None if window is None else window + 1
        whole = rlkernel.attention(q[None], keys[own][None], values[own][None], scale=0.11, window=seen)[0]
        assert_equal("rows of a prefill", found.split(rows.tolist())[i], whole[-rows[i] :])
        assert_equal("a step", step[i], whole[-1])
    with pytest.raises(RuntimeError, match="a decoder's own attention, got that of an encoder"):
        backend._run_sdpa_forward_decode(
            ones, torch.empty_like(ones), keys, values, *tables, is_cross_attn=True, **options
        )


def test_outside_the_mode_layers_are_sglangs(invariant):
    """As in an engine that lives on when its patch is undone."""
    layer, x, residual = norm(torch.bfloat16)
    packed, rotary = torch.randn(3, 512), RotaryEmbedding(64, 64, 32, 10000, True, torch.float32)
    keys, values, *tables = cached(torch.float32, [5, 3])
    backend, q = object.__new__(TorchNativeAttnBackend), torch.randn(2, 2, 64)
    embedding = gemma3_causal.Gemma3TextScaledWordEmbedding(8, 64, 0, embed_scale=55.4256).bfloat16()
    gate, angles = torch.randn(3, 8).bfloat16(), torch.randn(2, 64).bfloat16()
    experts = types.SimpleNamespace(
        num_experts=8,
        w13_weight=torch.randn(8, 64, 256).bfloat16(),
        w2_weight=torch.randn(8, 256, 32).bfloat16(),
    )
    silu, x3 = MoeRunnerConfig(activation="silu"), x[:3]

    def results():
        q_, k_ = packed.split([256, 256], dim=-1)
        return [
            *layer(x, residual),
            SiluAndMul()(packed),
            GeluAndMul()(packed),
            *Gemma3RMSNorm(256)(x, residual),
            embedding(torch.tensor([3, 1])),
            *gemma3_causal.apply_rotary_pos_emb(q.bfloat16(), q.bfloat16(), angles, angles),
            fused_moe_native.moe_forward_native(
                experts, x3, topk.fused_topk_native(x3, gate, 2, True) + (gate,), silu
            ),
            *rotary(torch.arange(3), q_, k_),
            backend._run_sdpa_forward_decode(q, torch.empty_like(q), keys, values, *tables, scaling=0.1),
        ]

    assert rlkernel.batch_invariant.is_enabled()
    invariant._mode.close()
    ours = results()
    invariant.undo()
    for found, want in zip(ours, results(), strict=True):
        assert_equal("a layer", found, want)
