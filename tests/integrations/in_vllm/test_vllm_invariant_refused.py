"""What ``batch_invariant`` does not cover is an error that names it, when a model is loaded."""

from types import SimpleNamespace

import invariant_models
import pytest
import torch
import transformers
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from rlkernel.integrations.vllm import attention_paged, invariant_experts, invariant_layers
from rlkernel.integrations.vllm.vllm_patch import VllmPatch


def config(eager=True, world_size=1, lora=None, drafts=None, quantised=None, cache="auto"):
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        parallel_config=SimpleNamespace(world_size=world_size),
        lora_config=lora,
        speculative_config=drafts,
        quant_config=quantised,
        cache_config=SimpleNamespace(cache_dtype=cache),
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"eager": False}, "enforce_eager=True, got a model that vLLM compiles"),
        ({"world_size": 2}, "one process for a model, got 2"),
        ({"lora": object()}, "no LoRA: merge it into the weights"),
        ({"drafts": object()}, "no speculative decoding"),
        ({"quantised": object()}, "weights that are not quantised, got object"),
        ({"cache": "fp8"}, "a cache of the model's dtype, got fp8"),
    ],
    ids=str,
)
def test_options(options, reason):
    runner = SimpleNamespace(vllm_config=config(**options))
    with pytest.raises(ValueError, match=f"batch_invariant must have {reason}"):
        invariant_layers._checked(None)(runner)
    assert invariant_layers._config_reason(config()) == ""


def test_layers_and_methods():
    class MambaMixer(torch.nn.Module):
        __module__ = "vllm.model_executor.layers.mamba.mamba_mixer"
        quant_method = object()

    runner = SimpleNamespace(vllm_config=config())
    runner.model = torch.nn.Sequential(torch.nn.Linear(2, 2), MambaMixer())
    with pytest.raises(ValueError, match="got a model with MambaMixer, Sequential, object"):
        invariant_layers._checked(lambda self, dummy: None)(runner)


def test_a_model_that_is_not_transformers_own():
    """vLLM's Qwen 3 drops the bias of the attention's last product."""
    made = transformers.Qwen3Config(**invariant_models.SIZES, attention_bias=True)
    runner = SimpleNamespace(vllm_config=config())
    runner.vllm_config.model_config.hf_config = made
    runner.model = transformers.Qwen3ForCausalLM(made)
    load = invariant_layers._checked(lambda self, dummy: None)
    load(runner)
    for layer in runner.model.model.layers:
        layer.self_attn.o_proj.bias = None
    with pytest.raises(
        ValueError, match="of .* parameters, got .*: vLLM passes over a setting of Qwen3Config"
    ):
        load(runner)


def experts(**changed):
    made = object.__new__(CPUUnquantizedExperts)
    layer = {
        "quant_method": SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=made)),
        "moe_config": SimpleNamespace(has_bias=False),
        "activation": MoEActivation.SILU,
        "apply_router_weight_on_input": False,
        "expert_map": None,
    }
    layer |= {k: changed[k] for k in layer.keys() & changed.keys()}
    router = changed.get("router", CPURouter(2, 8))
    shared = changed.get("shared_experts")
    return SimpleNamespace(routed_experts=SimpleNamespace(**layer), router=router, shared_experts=shared)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"router": CPURouter(2, 8, scoring_func="sigmoid")}, ["CPURouter"]),
        ({"router": CPURouter(2, 8, custom_routing_function=print)}, ["CPURouter"]),
        ({"shared_experts": object()}, ["experts with shared experts"]),
        ({"moe_config": SimpleNamespace(has_bias=True)}, ["experts with biases"]),
        ({"activation": MoEActivation.GELU}, ["experts with the activation gelu"]),
        ({"apply_router_weight_on_input": True}, ["experts with weights on their input"]),
        ({"quant_method": SimpleNamespace(moe_kernel=None)}, ["NoneType"]),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, list) else "",
)
def test_experts(changed, named):
    assert invariant_experts.strange(experts(**changed)) == named


def test_attention_that_is_left_to_vllm(monkeypatch):
    class Impl(attention_paged.Impl):
        paged_window = paged_attend = None

        def paged_refused(self, layer):
            return "ALiBi"

    Impl.__abstractmethods__ = frozenset()
    patch = VllmPatch(("attention",), True, batch_invariant=True)
    monkeypatch.setattr(VllmPatch, "in_place", lambda: patch)
    metadata = SimpleNamespace(rlkernel=SimpleNamespace(reason=""))
    with pytest.raises(RuntimeError, match="batch_invariant must have attention that is served, got ALiBi"):
        Impl().forward(*[None] * 5, metadata, None)
