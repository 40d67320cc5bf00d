"""Layers of vLLM's attention backends with ours in front, and the registry that has them: no engine.

Those of GPUs run interpreted, in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import attention_layers
import pytest
import torch
from vllm.v1.attention.backends import cpu_attn, registry

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import attention, attention_cpu, attention_gpu, attention_paged
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

MODULES = {name: module for module in (attention_cpu, attention_gpu) for name in module.THEIRS}
STOCK, OURS = cpu_attn.CPUAttentionBackend, attention_cpu.CPU_ATTN
DECODE, PREFILL = (1, 1, 1, 1), (3, 9, 1, 7)
LAYERS = {
    "plain": {},
    "window": {"sliding_window": 100},
    "softcap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 4)},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def planned(module, **options):
    patch = VllmPatch(("attention",), True, **options)
    with patch.planning("attention"):
        attention.replace(patch, module)
    return patch


def test_the_interpreted_gpu_kernel_gives_what_vllms_does(model):
    """In a process of their own: whether Triton is interpreted is asked at its import."""
    script = Path(__file__).with_name("interpreted_attention.py")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script, model], capture_output=True, text=True, env=interpreted)
    assert done.returncode == 0 and done.stdout.endswith("the same\n"), done.stdout + done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_the_registry_has_ours_until_undo(name):
    module, member = MODULES[name], registry.AttentionBackendEnum[name]
    theirs = module.THEIRS[name]
    with planned(module).apply():
        ours = member.get_class()
        assert ours is vars(module)[name] and ours.get_name() == name and issubclass(ours, theirs)
        assert issubclass(ours.get_impl_cls(), theirs.get_impl_cls())
        assert issubclass(ours.get_builder_cls(), theirs.get_builder_cls())
    assert member.get_class() is theirs and not member.is_overridden()


@pytest.mark.parametrize("name", MODULES)
def test_another_contract_is_refused(monkeypatch, name):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, more):
        pass

    theirs = MODULES[name].THEIRS[name]
    with monkeypatch.context() as changed:
        changed.setattr(theirs.get_impl_cls(), "forward", forward)
        with pytest.raises(PatchError, match="forward"):
            planned(MODULES[name])
    monkeypatch.setattr(theirs, "forward_includes_kv_cache_update", True)
    with pytest.raises(PatchError, match="must write keys and values before its forward"):
        planned(MODULES[name])


def test_a_registry_that_another_plugin_filled_is_refused(monkeypatch):
    member = registry.AttentionBackendEnum.TRITON_ATTN
    monkeypatch.setitem(vars(registry)["_ATTN_OVERRIDES"], member, "some.other.Backend")
    with pytest.raises(PatchError, match="vLLM's own TRITON_ATTN must be in its registry, got some.other"):
        planned(attention_gpu)


@pytest.fixture
def vector_kernels(monkeypatch):
    """Those that every processor has, whose layout of the cache is served."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture
def patch(vector_kernels):
    with planned(attention_cpu).apply() as patch:
        yield patch


def inputs(layers, rows, block=attention_layers.BLOCK):
    draw = torch.Generator().manual_seed(0)
    blocks, common = attention_layers.step(rows, block)
    dtype = layers.spec.dtype
    cache = torch.randn(blocks, layers.kv_heads, block, 2 * layers.dim, generator=draw).to(dtype)
    query = torch.randn(sum(rows), layers.heads, layers.dim, generator=draw).to(dtype)
    return common, cache, query


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block", [16, 32])
def test_the_outputs_are_those_of_vllm(model, patch, block, dtype):
    layers = attention_layers.Layers(model, block, dtype)
    for rows in (DECODE, PREFILL):
        given = inputs(layers, rows, block)
        for layer in LAYERS.values():
            got, want = (layers.attended(backend, *given, **layer) for backend in (OURS, STOCK))
            torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert patch.calls == {"attention": 2 * len(LAYERS)} and not patch.fallbacks
    read, apart = (patch.bytes[key] for key in (attention_paged.READ, attention_paged.APART))
    assert 0 < 1.5 * read < apart


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(model, vector_kernels, dtype):
    with planned(attention_cpu, batch_invariant=True).apply() as patch:
        same_bits(attention_layers.Layers(model, 16, dtype))
    assert patch.calls and not patch.fallbacks


def same_bits(layers):
    for rows in (DECODE, PREFILL):
        common, cache, query = inputs(layers, rows)
        for name, layer in LAYERS.items():
            whole = layers.attended(OURS, common, cache, query, **layer).split(rows)
            for i, (n, want) in enumerate(zip(rows, whole, strict=True)):
                mine = query.split(rows)[i]
                for last in {1, n}:  # decoded, and in a chunk of a prefill
                    alone = attention_layers.request(common, i, last)
                    got = layers.attended(OURS, alone, cache, mine[-last:], **layer)
                    assert torch.equal(got, want[-last:]), f"{name}, {last} rows of request {i}"


def test_what_is_left_to_vllm_has_vllms_bits(model, patch):
    layers = attention_layers.Layers(model)
    common, cache, query = inputs(layers, DECODE)

    def left(reason, common=common, **layer):
        want = layers.attended(STOCK, common, cache, query, **layer)
        assert torch.equal(layers.attended(OURS, common, cache, query, **layer), want)
        assert [x for x in patch.fallbacks if reason in x], patch.fallbacks
        patch.fallbacks.clear()

    left("ALiBi", alibi_slopes=[0.1] * layers.heads)
    table = common.block_table_tensor.clone()
    table[:, 0] = torch.arange(4)
    left(attention_paged.ALONE, common.replace(block_table_tensor=table))
    left("the attention is not causal", common.replace(causal=False))
    assert not patch.calls


def test_a_layout_of_another_instruction_set_is_left_to_vllm():
    layer = attention_layers.Layer()
    layer.isa = "amx"
    reason = OURS.get_impl_cls().paged_refused(None, layer)
    assert reason == "the kernels' instruction set must be one of vec, vec16, got amx"


def test_a_plan_is_made_once_a_step_for_layers_with_the_same_window(model, monkeypatch):
    made = []
    make = attention_paged.rlkernel.paged_prefix_plan
    monkeypatch.setattr(
        attention_paged.rlkernel, "paged_prefix_plan", lambda *x, **k: made.append(1) or make(*x, **k)
    )
    _, common = attention_layers.step(DECODE)
    step = attention_paged.Step(common, every=False)
    for window in (None, 100, None, 100):
        assert step.plan(attention_layers.BLOCK, window).window == (window or 0)
    assert len(made) == 2
