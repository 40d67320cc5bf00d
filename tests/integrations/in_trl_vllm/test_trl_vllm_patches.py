"""When patch_trl() brings vLLM's patch with it, when not, and that both leave everything as it was."""

import json
import os
import subprocess
import sys
import types

import hypothesis
import pytest
import runs
import trl
from hypothesis import strategies
from patch_orders import same, state, steps
from trl.trainer.base_trainer import _BaseTrainer
from vllm.v1.sample.sampler import Sampler

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

STOCK = Sampler.forward
USES_VLLM = types.SimpleNamespace(use_vllm=True, vllm_mode="colocate")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = switches()
    yield
    assert Sampler.forward is STOCK and VllmPatch.in_place() is None and switches() == before


def switches():
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def bring(patch):
    """What a trainer with an engine does, without the engine."""
    patch.rollouts.prepare(types.SimpleNamespace(args=USES_VLLM))


def test_without_a_trainer_that_uses_it_vllm_is_not_imported():
    code = """
import sys, rlkernel, trl
with rlkernel.patch_trl(vllm="require") as patch:
    import trl.trainer.base_trainer
    assert patch.vllm is None
assert not any(name.partition(".")[0] == "vllm" for name in sys.modules), "vllm"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_trainer_that_generates_by_itself_brings_nothing(model, tmp_path):
    with rlkernel.patch_trl(vllm="require") as patch:
        runs.make_trainer(model, tmp_path, use_vllm=False, max_steps=1).train()
        assert patch.vllm is None and Sampler.forward is STOCK


def test_a_trainer_that_was_made_before_brings_it_when_it_trains(model, tmp_path, monkeypatch):
    trainer = runs.make_trainer(model, tmp_path, use_vllm=False, max_steps=1)
    monkeypatch.setattr(trainer.args, "use_vllm", True)
    seen = []
    monkeypatch.setattr(
        trl.GRPOTrainer, "_inner_training_loop", lambda self, **_: seen.append(Sampler.forward)
    )
    with rlkernel.patch_trl() as patch:
        trainer.train()
        assert patch.vllm.active and seen == [Sampler.forward] != [STOCK]
    trainer.train()
    assert seen[1] is STOCK


def test_nothing_is_brought_where_it_is_not_wanted(model, tmp_path):
    with rlkernel.patch_trl(vllm=False) as patch:
        assert "__init__" not in str(patch) and patch.rollouts is None and patch.vllm is None


def test_a_patch_of_ones_own_stays_what_and_where_it_is():
    with rlkernel.patch_vllm(ops=("sampler",)) as mine:
        with rlkernel.patch_trl() as patch:
            bring(patch)
            assert patch.vllm is None and VllmPatch.in_place() is mine
        assert mine.active and mine.ops == ("sampler",)


def test_undo_is_refused_as_a_whole_where_vllm_was_patched_over():
    patch = rlkernel.patch_trl()
    bring(patch)
    ours, Sampler.forward = Sampler.forward, "somebody else's"
    with pytest.raises(PatchError, match="Sampler.forward: it must hold .*somebody else's"):
        patch.undo()
    assert patch.active and patch.vllm.active and "__init__" in str(patch)
    Sampler.forward = ours
    patch.undo()


def test_a_vllm_that_is_another_is_left_alone_or_an_error(monkeypatch):
    with monkeypatch.context() as upstream:
        upstream.setattr(Sampler, "forward", lambda self, logits: logits)
        with rlkernel.patch_trl() as patch, pytest.warns(UserWarning, match="leaves vLLM to TRL: sampler"):
            bring(patch)
            assert [reason.split(": ")[:2] for reason in patch.fallbacks][0] == ["vLLM", "sampler"]
        with (
            rlkernel.patch_trl(vllm="require") as patch,
            pytest.raises(PatchError, match="sampler cannot be replaced"),
        ):
            bring(patch)


def test_doctor_knows_both():
    command = [sys.executable, "-m", "rlkernel.doctor", "--json", "trl", "vllm"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    mine, vllm = json.loads(found.stdout)
    assert mine["reason"] is None and vllm["reason"] is None and vllm["installed"].startswith("0.31.")
    assert mine["notes"] == {
        f"vLLM {vllm['installed']}": "rlkernel goes under it when a trainer has use_vllm=True"
    }


# in any order

PATCHES = {
    "trl": rlkernel.patch_trl,
    "packed": lambda: rlkernel.patch_trl(prefix_sharing=True),  # transformers' attention, and its models
    "vllm": rlkernel.patch_vllm,
    "sampler": lambda: rlkernel.patch_vllm(ops=("sampler",)),
    "deepspeed": rlkernel.patch_deepspeed,
}
ROOTS = ("trl", "vllm", "deepspeed", "transformers", "accelerate")


@pytest.fixture(scope="module")
def loaded():
    """Every module that a patch imports, so that a state is that of all."""
    for patch in PATCHES.values():
        with patch() as on:
            if getattr(on, "rollouts", None) is not None:
                bring(on)
    assert vars(_BaseTrainer).get("train") is None


@hypothesis.settings(max_examples=12, deadline=None, suppress_health_check=[*hypothesis.HealthCheck])
@hypothesis.given(order=steps(strategies.sampled_from((*PATCHES, "trainer", "all"))))
def test_any_order_leaves_everything_as_it_was(loaded, order):
    before, environment = state(ROOTS), switches()
    active = {}
    for name, on in order:
        if name == "trainer":
            if trl_patch := active.get("trl") or active.get("packed"):
                bring(trl_patch)
        elif name == "all":
            rlkernel.unpatch_all()  # the handles stay, and undo nothing
        elif not on:
            if name in active:
                handle = active.pop(name)
                handle.undo()
                handle.undo()
        else:
            try:
                active[name] = PATCHES[name]()
            except PatchError as error:
                assert "must be what the patch in place has" in str(error)
    assert active or VllmPatch.in_place() is None
    rlkernel.unpatch_all()
    assert same(before, state(ROOTS)) and switches() == environment
