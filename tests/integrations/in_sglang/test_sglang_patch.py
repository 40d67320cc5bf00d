"""What rlkernel.patch_sglang() replaces in the real SGLang, restores and refuses; and its plugins."""

import dataclasses
import importlib.metadata
import sys

import pytest
import sglang
import steps
from doors import Door
from sglang.srt.arg_groups.choices import SAMPLING_BACKEND_CHOICES
from sglang.srt.layers import sampler as home
from sglang.srt.layers.logprob_processor import InputLogprobProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang_environment import POINTS

import rlkernel
from rlkernel.integrations import sglang as integration
from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.sglang import backend, contract, install, switch

DOOR = Door(
    rlkernel.patch_sglang, integration.SglangPatch, "sglang", "SGLang", contract.SUPPORTED, switch, switch.OWN
)
upstream, nothing_left_behind = DOOR.fixtures()


def test_what_is_replaced_and_restored():
    before, backends = DOOR.everything(), set(SAMPLING_BACKEND_CHOICES)
    with rlkernel.patch_sglang() as patch:
        assert "sampler.Sampler.forward -> rlkernel.sample" in str(patch)
        assert "logprob_processor.InputLogprobProcessor._forward_by_chunk -> rlkernel.logprob" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused
        assert backends | {"rlkernel"} == SAMPLING_BACKEND_CHOICES
        DOOR.check_one_at_a_time(patch)
    assert backends == SAMPLING_BACKEND_CHOICES and not home._CUSTOM_SAMPLER_FACTORIES
    DOOR.check_restored(before)


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_sglang([part]) as patch:
        assert ("Sampler.forward" in str(patch)) == (part == "sampler")
        assert ("rlkernel" in SAMPLING_BACKEND_CHOICES) == (part == "sampler")
        DOOR.check_parts(part)
    patch.undo()


def test_the_example():
    DOOR.check_example()


def test_refusals(monkeypatch):
    def become(changed, version):
        if version is None:
            changed.setitem(sys.modules, "sglang", None)
        else:
            changed.setattr(sglang, "__version__", version)

    DOOR.check_refusals(monkeypatch, become, ["0.5.22", "0.6.0"])


def _without_a_field(changed):
    kept = [x for x in dataclasses.fields(SamplingBatchInfo) if x.name != "min_ps"]
    changed.setattr(dataclasses, "fields", lambda kind: kept)


SAMPLER, PROMPTS = "sglang.srt.layers.sampler.Sampler.forward", "InputLogprobProcessor._forward_by_chunk"
CHANGES = {
    "sampler": lambda m: m.setattr(Sampler, "forward", lambda self, logits_output, sampling_info: 0),
    "prompt_logprobs": lambda m: m.setattr(InputLogprobProcessor, "_forward_by_chunk", lambda self, rows: 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_sglang(monkeypatch, caplog, name):
    kept = SAMPLER if name == "prompt_logprobs" else f"sglang.srt.layers.logprob_processor.{PROMPTS}"
    DOOR.check_change(monkeypatch, caplog, CHANGES[name], name, kept)


def test_helpers_and_fields_are_compared_too(monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(Sampler, "_preprocess_logits", lambda self, logits: logits)
        with pytest.raises(
            PatchError, match=r"sampler cannot be replaced: Sampler._preprocess_logits must take"
        ):
            rlkernel.patch_sglang()
    with monkeypatch.context() as changed:
        _without_a_field(changed)
        with pytest.raises(PatchError, match="SamplingBatchInfo must have the fields min_ps"):
            rlkernel.patch_sglang(["sampler"])


@pytest.mark.parametrize(
    ("owner", "name"), [(Sampler, "forward"), (InputLogprobProcessor, "_forward_by_chunk")]
)
def test_what_somebody_has_put_around_a_function_stays(monkeypatch, owner, name):
    DOOR.check_around(monkeypatch, owner, name)


def test_somebody_else_replaces_what_is_replaced(monkeypatch):
    def replace(others):
        others.setattr(Sampler, "forward", lambda *x: "somebody else's")

    DOOR.check_somebody_else(monkeypatch, replace, "Sampler.forward")


def test_the_switch(monkeypatch, caplog):
    monkeypatch.setenv(switch.SWITCH, "1")
    assert switch.asked() == Asked(switch.PARTS, False)
    monkeypatch.setenv(switch.SWITCH, "0")
    assert switch.asked() is None
    monkeypatch.delenv(switch.SWITCH)
    DOOR.check_asked_once(monkeypatch, caplog, install.register, "prompt_logprobs")
    DOOR.check_wrong_name(monkeypatch, caplog, install.register)


def test_processes_that_would_not_load_it(monkeypatch):
    for change, reason in (
        (
            lambda m: m.setenv(switch.PLUGINS, "other, another"),
            "SGLANG_PLUGINS=other, another leaves 'rlkernel'",
        ),
        (lambda m: m.setattr(switch, "entry_points", lambda group: []), "not installed with its entry point"),
    ):
        with monkeypatch.context() as changed:
            change(changed)
            with pytest.raises(PatchError, match=f"SGLang's processes will not load rlkernel: .*{reason}"):
                rlkernel.patch_sglang()
            assert not DOOR.kind.in_place()
            with (
                pytest.warns(UserWarning, match=f"reaches this process alone, .*{reason}"),
                rlkernel.patch_sglang(strict=False) as patch,
            ):
                assert patch.replaced


def test_sglang_finds_and_runs_the_entry_point(monkeypatch):
    from sglang.srt import plugins

    assert POINTS == {"rlkernel": "rlkernel.integrations.sglang:register"}
    found = plugins.load_plugins_by_group(switch.GROUP)
    assert found["rlkernel"][0] is integration.register
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()
    assert DOOR.kind.in_place() is None  # nothing has asked for it
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv(switch.SWITCH, "sampler")
    plugins.load_plugins()
    assert DOOR.kind.in_place().parts == ("sampler",)
    assert rlkernel.unpatch_all() == [DOOR.path]
    assert importlib.metadata.entry_points(group=switch.GROUP)


def test_the_name_among_the_sampling_backends():
    """As ``--sampling-backend rlkernel``; what is left to SGLang has a backend that it knows."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    command = ["--model-path", "model", "--sampling-backend", "rlkernel"]

    def parsed():
        parser = argparse.ArgumentParser(exit_on_error=False)
        ServerArgs.add_cli_args(parser)
        return parser.parse_args(command)

    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed()
    with rlkernel.patch_sglang() as patch, steps.arguments(sampling_backend="rlkernel"):
        assert parsed().sampling_backend == "rlkernel"
        own = steps.sampler(home.create_sampler)
        assert type(own) is Sampler and get_exec().kernel.sampling_backend in ("pytorch", "flashinfer")
        told = steps.info([{"top_k": 4}] * 2, 50, mask=True)
        import torch

        with pytest.warns(UserWarning, match="return_sampling_mask"):
            tokens, output = steps.step(torch.randn(2, 50), [], own=own, sampling=told)
        assert output.sampling_mask_output.lengths.tolist() == [4, 4] and len(tokens) == 2
        steps.step(torch.randn(2, 50), [{"top_k": 4}] * 2, own=own)
        assert patch.calls["Sampler.forward"] == 1
    assert backend.BACKEND not in home._CUSTOM_SAMPLER_FACTORIES
