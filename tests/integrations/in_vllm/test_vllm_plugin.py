"""The way in: the entry point, what it finds, what it refuses, and how it leaves."""

import os

import pytest
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import install, register, switch
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

OWNERS = (Sampler, GPUModelRunner, WorkerBase)


@pytest.fixture(autouse=True)
def as_it_was():
    import vllm.envs

    install._failed = False
    before = [dict(vars(owner)) for owner in OWNERS], dict(vllm.envs.environment_variables)
    yield
    if (patch := VllmPatch.in_place()) is not None:
        patch.undo()
    assert before == ([dict(vars(owner)) for owner in OWNERS], dict(vllm.envs.environment_variables))


def test_the_entry_point_is_found_by_vllm():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["rlkernel"] is register
    register()
    assert VllmPatch.in_place() is None  # nothing has asked for it


def test_the_environment_switches_it_on_once(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "prompt_logprobs")
    stock = Sampler.forward
    register()
    patch = VllmPatch.in_place()
    assert patch.ops == ("prompt_logprobs",) and Sampler.forward is stock
    register()
    assert VllmPatch.in_place() is patch


def test_a_second_call_shares_the_patch_and_other_ops_are_refused():
    with rlkernel.patch_vllm() as patch:
        assert rlkernel.patch_vllm() is patch
        with pytest.raises(PatchError, match="ops must be what the patch in place has"):
            rlkernel.patch_vllm(ops=("sampler",))


def test_vllm_knows_our_variables(monkeypatch):
    from vllm.platforms import current_platform

    for name in list(os.environ):
        if name.startswith("VLLM_"):  # it knows not even all of its own
            monkeypatch.delenv(name)
    with rlkernel.patch_vllm():
        current_platform.validate_environ(hard_fail=True)
    monkeypatch.setenv(switch.SWITCH, "sampler")
    with pytest.raises(ValueError, match="Unknown vLLM environment variable detected: VLLM_RLKERNEL"):
        current_platform.validate_environ(hard_fail=True)


def test_an_op_that_finds_another_vllm_is_left_to_it(monkeypatch, caplog):
    def forward(self, logits, sampling_metadata, more):
        raise AssertionError

    monkeypatch.setattr(Sampler, "forward", forward)
    reason = "vllm.v1.sample.sampler.Sampler.forward must take"
    with rlkernel.patch_vllm() as patch:
        assert Sampler.forward is forward and list(patch.refused) == ["sampler", "support"]
        assert "forward must take" in patch.refused["sampler"] and "more" in patch.refused["sampler"]
        assert "leaves sampler to vLLM" in caplog.text, reason
        assert any("_get_prompt_logprobs_dict" in path for path in patch.replaced)
        assert not any("_bookkeeping_sync" in path for path in patch.replaced)  # not half of the op
    with pytest.raises(PatchError, match="sampler cannot be replaced: Sampler.forward must take"):
        rlkernel.patch_vllm(strict=True)
    assert VllmPatch.in_place() is None and not switch.is_on()


def test_a_batch_with_a_field_that_we_do_not_know_is_refused(monkeypatch):
    import dataclasses

    from vllm.v1.sample import metadata

    from rlkernel.integrations.vllm import sampler

    wider = dataclasses.make_dataclass("Wider", [("more", int, 0)], bases=(metadata.SamplingMetadata,))
    monkeypatch.setattr(sampler, "SamplingMetadata", wider)
    with pytest.raises(PatchError, match="Wider must have the fields"):
        rlkernel.patch_vllm(strict=True)


def test_a_version_that_has_not_been_run_is_refused_by_strict_alone(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    with pytest.raises(PatchError, match="the version of vllm must be >=.*, got 0.40.0"):
        rlkernel.patch_vllm(strict=True)
    with pytest.warns(UserWarning, match="run with vLLM .*, and this is 0.40.0"):
        patch = rlkernel.patch_vllm()
    with patch:
        assert not patch.refused


def test_a_list_of_plugins_without_us_is_told(monkeypatch):
    monkeypatch.setenv(switch.PLUGINS, "lora_filesystem_resolver")
    with pytest.warns(UserWarning, match="VLLM_PLUGINS=lora_filesystem_resolver leaves 'rlkernel' out"):
        rlkernel.patch_vllm().undo()
    with pytest.raises(PatchError, match="worker processes will not load rlkernel"):
        rlkernel.patch_vllm(strict=True)
    assert VllmPatch.in_place() is None and not switch.is_on()


def test_undo_refuses_to_remove_what_somebody_put_over_it():
    patch = rlkernel.patch_vllm()
    ours, Sampler.forward = Sampler.forward, lambda self, *_: None
    with pytest.raises(PatchError, match="something else has replaced it since"):
        patch.undo()
    Sampler.forward = ours
    patch.undo()
