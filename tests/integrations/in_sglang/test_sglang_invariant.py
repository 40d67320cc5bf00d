"""Two programs, one number: what SGLang's engine reports of a token is what transformers computes of it."""

import os
import types

import generated
import invariant_models
import pytest
import torch
from bitwise import assert_equal
from invariant_models import Sample
from sglang.srt.layers.activation import NewGELU, SiluAndMul
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.model_runner import ModelRunner

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.sglang import install, invariant_layers, switch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEW = 16


@pytest.fixture
def invariant():
    with rlkernel.patch_sglang(batch_invariant=True) as patch:
        yield patch


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
    ("family", "dtype"), [("Qwen3", "bfloat16"), ("Llama", "float16"), ("Qwen2", "float32")]
)
def test_an_engine_reports_what_transformers_computes(tmp_path, family, dtype):
    """With prefills in chunks beside the steps of others and prefixes from the cache."""
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
    outputs, text = generated.run(path, request, patch={"batch_invariant": True}, engine=engine)
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

    def results():
        q_, k_ = packed.split([256, 256], dim=-1)
        return [
            *layer(x, residual),
            SiluAndMul()(packed),
            *rotary(torch.arange(3), q_, k_),
            backend._run_sdpa_forward_decode(q, torch.empty_like(q), keys, values, *tables, scaling=0.1),
        ]

    assert rlkernel.batch_invariant.is_enabled()
    invariant._mode.close()
    ours = results()
    invariant.undo()
    for found, want in zip(ours, results(), strict=True):
        assert_equal("a layer", found, want)


# -- what is refused


def arguments_of_a_server(**other):
    fits = {name: values[-1] for name, values in invariant_layers.ARGUMENTS.items()}
    return types.SimpleNamespace(server_args=types.SimpleNamespace(**(fits | other)))


@pytest.mark.parametrize(
    ("name", "got"),
    [("device", "cuda"), ("attention_backend", "triton"), ("tp_size", 2), ("quantization", "fp8"),
     ("enable_lora", True), ("speculative_algorithm", "EAGLE"), ("enable_fp32_lm_head", True),
     ("rl_on_policy_target", "fsdp"), ("kv_cache_dtype", "fp8_e5m2"), ("decode_attention_backend", "triton")],
)  # fmt: skip
def test_an_engine_with_other_options_is_refused(invariant, name, got):
    with pytest.raises(ValueError, match=f"batch_invariant must have {name}=.*, got {got!r}"):
        ModelRunner.load_model(arguments_of_a_server(**{name: got}))


class LlamaForCausalLM(torch.nn.ModuleList):
    """A model by a name that is known."""


def test_layers_that_were_not_compared_are_named(invariant):
    layers = [NewGELU(), RMSNorm(8, var_hidden_size=4), torch.nn.Linear(2, 2)]
    layers.append(RadixAttention(4, 64, 0.1, 2, 0, logit_cap=30.0))
    want = ["NewGELU", "RMSNorm with options", "RadixAttention with options"]
    assert invariant_layers._strange(LlamaForCausalLM(layers)) == want
    assert invariant_layers._strange(torch.nn.ModuleList(layers)) == ["ModuleList", *want]
    layers[1].quant_method = object()
    model = LlamaForCausalLM(layers[1:3])
    model.config = types.SimpleNamespace(use_sliding_window=True)
    assert invariant_layers._strange(model) == ["RMSNorm with options", "object", "sliding windows"]


def test_kernels_of_amx_are_refused(monkeypatch):
    monkeypatch.setattr(invariant_layers.layernorm, "_is_cpu_amx_available", True)
    with pytest.raises(PatchError, match="batch_invariant cannot be replaced: .*, got sgl-kernel's for AMX"):
        rlkernel.patch_sglang(batch_invariant=True)
    assert not rlkernel.batch_invariant.is_enabled()
    with rlkernel.patch_sglang(batch_invariant=True, strict=False) as patch:
        assert "batch_invariant" in patch.refused and not rlkernel.batch_invariant.is_enabled()


def test_how_it_is_asked_for(monkeypatch):
    with pytest.raises(ValueError, match=r"parts must be \('sampler', 'prompt_logprobs'\) where batch_inv"):
        rlkernel.patch_sglang(["sampler"], batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant must be True or False, got 1"):
        rlkernel.patch_sglang(batch_invariant=1)
    with rlkernel.patch_sglang(batch_invariant=True) as patch:
        assert os.environ[switch.INVARIANT] == "1" and rlkernel.batch_invariant.is_enabled()
        with pytest.raises(PatchError, match="must be what the patch in place has, True, got False"):
            rlkernel.patch_sglang()
    assert switch.INVARIANT not in os.environ and not rlkernel.batch_invariant.is_enabled()
    monkeypatch.setenv(switch.SWITCH, "1")
    monkeypatch.setenv(switch.INVARIANT, "1")
    install.register()
    patch = install.SglangPatch.in_place()
    assert patch.batch_invariant and rlkernel.batch_invariant.is_enabled()
    patch.undo()
    assert not rlkernel.batch_invariant.is_enabled()
