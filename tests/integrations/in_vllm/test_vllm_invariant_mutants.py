"""Each piece of ``batch_invariant`` is needed: with one operator left to vLLM a token's number differs."""

import contextlib

import engines
import invariant_models
import pytest
import torch
from invariant_models import OPS, differences, engine, loaded, rollout, samples, saved
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

import rlkernel
from rlkernel.consistency import mode
from rlkernel.integrations.vllm import plain
from rlkernel.integrations.vllm.vllm_patch import VllmPatch
from rlkernel.ops.sampling import outputs

# vLLM's own, before anything is replaced
NORM, ROTARY, ROUTE = RMSNorm.forward_native, RotaryEmbedding.forward_cpu, CPURouter._compute_routing
EXPERTS = CPUUnquantizedExperts.apply


def nudged(x):
    """By a unit in the last place: on some processors vLLM's own operator has the bits of ours."""
    return torch.nextafter(x, torch.zeros_like(x))


def product(model, change):
    def stock(own):
        def linear(x, weight, bias):
            with mode.suspended():  # it is torch's where vLLM has no kernel for the processor
                return nudged(own(x, weight, bias))

        return linear

    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            change.setattr(layer, "cpu_linear", None)
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            layer.cpu_linear = stock(layer.cpu_linear)


def attention(model, change):
    change.setattr(VllmPatch.in_place(), "batch_invariant", False)


def norm(model, change):
    change.setattr(RMSNorm, "forward_native", NORM)


def rotary(model, change):
    def stock(own):
        def turned(positions, query, key=None):
            query, key = own(positions, query, key)
            return nudged(query), key

        return turned

    for layer in model.modules():
        if isinstance(layer, RotaryEmbedding):
            change.setattr(layer, "_forward_method", stock(ROTARY.__get__(layer)))


def activation(model, change):
    def stock(x):
        with mode.suspended():
            return SiluAndMul.forward_native(x)

    for layer in model.modules():
        if isinstance(layer, SiluAndMul):
            change.setattr(layer, "_forward_method", stock)


def logprob(model, change):
    change.setattr(outputs, "as_trained", lambda call, stats, *rest, **options: stats)
    change.setattr(plain, "takes", lambda *step: False)  # the same numbers, made in one call


def experts(model, change):
    def apply(self, output, hidden_states, w1, w2, *rest, **options):
        packed = (cpu_prepack_moe_weight(w, self.isa) for w in (w1, w2))
        EXPERTS(self, output, hidden_states, *packed, *rest, **options)

    change.setattr(CPUUnquantizedExperts, "apply", apply)


def router(model, change):
    change.setattr(CPURouter, "_compute_routing", ROUTE)


def nothing(model, change):
    pass


MUTANTS = {
    ("Qwen3", torch.float32): (product, attention, activation, rotary, logprob),
    # in fp32 vLLM's norm is the same formula, of operations that the mode serves there too
    ("Qwen3Moe", torch.bfloat16): (product, attention, norm, rotary, experts, router),
}


def prompts():
    """None of which share a block."""
    return invariant_models.prompts()[:4]


@contextlib.contextmanager
def served(path, dtype):
    with rlkernel.patch_vllm(ops=OPS, batch_invariant=True, strict=True):
        llm = engine(path, dtype)
        try:
            yield (
                llm,
                llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model,
            )
        finally:
            engines.shut_down(llm)


def differing(llm, change, mutant, model, scorer):
    with change.context() as inside:
        mutant(model, inside)
        found = samples(rollout(llm, prompts(), n=1, max_tokens=12))
    assert llm.reset_prefix_cache()
    return int((differences(scorer, found) > 0).sum())


@pytest.mark.parametrize(("family", "dtype"), MUTANTS, ids=str)
def test_each_operator_alone_is_seen(family, dtype, tmp_path, monkeypatch):
    path = saved(tmp_path, family, dtype)
    scorer = loaded(path, dtype)
    with served(path, dtype) as (llm, model):
        seen = {
            mutant.__name__: differing(llm, monkeypatch, mutant, model, scorer)
            for mutant in (*MUTANTS[family, dtype], nothing)
        }
    assert seen.pop("nothing") == 0  # and each mutant has gone
    assert all(seen.values()), seen
