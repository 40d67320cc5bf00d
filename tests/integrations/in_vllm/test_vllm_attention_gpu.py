"""Attention with shared prefixes in vLLM's GPU backends: with its own metadata, interpreted, on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.v1.attention.backends import flash_attn, registry, triton_attn

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import attention_flash, attention_gpu, attention_triton
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

THEIRS = {"TRITON_ATTN": triton_attn.TritonAttentionBackend, "FLASH_ATTN": flash_attn.FlashAttentionBackend}


def planned():
    patch = VllmPatch(("attention",), True)
    with patch.planning("attention"):
        attention_gpu.plan(patch)
    return patch


def test_the_interpreted_kernel_gives_what_vllms_does(model):
    """In a process of their own: whether Triton is interpreted is asked at its import."""
    script = Path(__file__).with_name("interpreted_attention.py")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script, model], capture_output=True, text=True, env=interpreted)
    assert done.returncode == 0 and done.stdout.endswith("the same\n"), done.stdout + done.stderr


def test_the_registry_has_ours_until_undo():
    with planned().apply():
        for name, module in (("TRITON_ATTN", attention_triton), ("FLASH_ATTN", attention_flash)):
            assert registry.AttentionBackendEnum[name].get_class() is module.Backend
            assert module.Backend.get_name() == name and issubclass(module.Backend, THEIRS[name])
    for name, theirs in THEIRS.items():
        member = registry.AttentionBackendEnum[name]
        assert member.get_class() is theirs and not member.is_overridden()


@pytest.mark.parametrize("theirs", THEIRS.values(), ids=THEIRS)
def test_another_contract_is_refused(monkeypatch, theirs):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, more):
        pass

    with monkeypatch.context() as changed:
        changed.setattr(theirs.get_impl_cls(), "forward", forward)
        with pytest.raises(PatchError, match="forward"):
            planned()
    monkeypatch.setattr(theirs, "forward_includes_kv_cache_update", True)
    with pytest.raises(PatchError, match="must write keys and values before its forward"):
        planned()


def test_a_registry_that_another_plugin_filled_is_refused(monkeypatch):
    member = registry.AttentionBackendEnum.TRITON_ATTN
    monkeypatch.setitem(vars(registry)["_ATTN_OVERRIDES"], member, "some.other.Backend")
    with pytest.raises(PatchError, match="vLLM's own TRITON_ATTN must be in its registry, got some.other"):
        planned()
