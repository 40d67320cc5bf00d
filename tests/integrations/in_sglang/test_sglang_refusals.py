"""Models and engines that ``patch_sglang(batch_invariant=True)`` refuses, which are named."""

import os
import types

import invariant_models
import pytest
import torch
import transformers
from sglang.srt.layers.activation import NewGELU
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.model_runner import ModelRunner

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.sglang import compared, install, invariant_experts, invariant_layers, switch


def arguments_of_a_server(**other):
    fits = {name: values[-1] for name, values in compared.ARGUMENTS.items()}
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
    assert compared.strange(LlamaForCausalLM(layers)) == want
    assert compared.strange(torch.nn.ModuleList(layers)) == ["ModuleList", *want]
    layers[1].quant_method = object()
    model = LlamaForCausalLM(layers[1:3])
    assert compared.strange(model) == ["RMSNorm with options", "object"]


def test_a_model_is_looked_at_when_it_is_loaded(invariant):
    runner, config = arguments_of_a_server(), transformers.LlamaConfig(**invariant_models.SIZES)
    runner.model, loaded = torch.nn.ModuleList([NewGELU()]), []
    runner.model_config = types.SimpleNamespace(hf_config=config)
    with pytest.raises(ValueError, match="compared with transformers, got a model with ModuleList, NewGELU"):
        compared.checked(loaded.append)(runner)
    runner.model = LlamaForCausalLM([transformers.LlamaForCausalLM(config)])
    compared.checked(loaded.append)(runner)
    assert loaded == [runner, runner]
    config.mlp_bias = True
    with pytest.raises(
        ValueError, match="of 1,051,392 parameters, got 1,049,856: SGLang passes over a setting"
    ):
        compared.checked(loaded.append)(runner)


class Gemma3ForCausalLM(torch.nn.ModuleList):
    """Another."""


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (LlamaForCausalLM, {"sliding_window": 16}, "sliding windows"),
        (LlamaForCausalLM, {"sliding_window": 16, "layer_types": ["sliding_attention"]}, "sliding windows"),
        (LlamaForCausalLM, {"sliding_window": 16, "layer_types": ["full_attention"]}, None),
        (LlamaForCausalLM, {"sliding_window": None, "tie_word_embeddings": False}, None),
        (Gemma3ForCausalLM, TIED, None),
        (Gemma3ForCausalLM, {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (Gemma3ForCausalLM, TIED | {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        (Gemma3ForCausalLM, TIED | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_settings_that_sglang_passes_over_are_named(kind, settings, named):
    model = kind([torch.nn.Linear(2, 2)])
    model.config = types.SimpleNamespace(**settings)
    assert compared.strange(model) == ([] if named is None else [named])
    model.append(RadixAttention(4, 64, 0.1, 2, 0, sliding_window_size=15))
    assert "sliding windows" not in compared.strange(model)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("use_grouped_topk", True), ("scoring_func", "sigmoid"), ("correction_bias", 1),
     ("routed_scaling_factor", 2.5), ("custom_routing_function", print)],
)  # fmt: skip
def test_routers_that_were_not_compared_are_named(setting, value):
    router = object.__new__(topk.TopK)
    torch.nn.Module.__init__(router)
    router.topk_config = topk.TopKConfig(top_k=2)
    assert invariant_experts.strange(router) == []
    setattr(router.topk_config, setting, value)
    assert invariant_experts.strange(router) == [f"a router with {setting}"]


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [("activation", "gelu", "experts with activation"), ("gemm1_alpha", 1.7, "experts with gemm1_alpha"),
     ("apply_router_weight_on_input", True, "experts with apply_router_weight_on_input"),
     ("moe_ep_size", 2, "a part of the experts"), ("w13_weight_bias", 1, "experts with biases"),
     ("quant_method", torch.nn.Identity(), "experts of Identity")],
)  # fmt: skip
def test_experts_that_were_not_compared_are_named(setting, value, named):
    experts = object.__new__(FusedMoE)
    torch.nn.Module.__init__(experts)
    method = object.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.w13_swiglu_interleaved = False
    experts.moe_runner_config, experts.quant_method = MoeRunnerConfig(), method
    experts.moe_ep_size = experts.moe_tp_size = 1
    assert invariant_experts.strange(experts) == []
    owner = experts.moe_runner_config if hasattr(experts.moe_runner_config, setting) else experts
    setattr(owner, setting, value)
    assert invariant_experts.strange(experts) == [named]


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
