"""What rlkernel.patch_llamafactory() replaces, restores and refuses, and how it waits and is asked for."""

import importlib
import os
import subprocess
import sys
import warnings

import llamafactory
import llamafactory.v1.launcher as launcher_of_v1
import pytest
from doors import Door, check_idle_entry_point
from factory import CustomDPOTrainer, CustomKTOTrainer, CustomSeq2SeqTrainer
from llamafactory import launcher
from llamafactory.train import trainer_utils
from llamafactory.v1.core.base_trainer import BaseTrainer

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.llamafactory import __main__, contract, install, switch
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch

DOOR = Door(
    rlkernel.patch_llamafactory, LlamafactoryPatch, "llamafactory", "LLaMA-Factory", contract.SUPPORTED,
    switch, switch.OWN,
)  # fmt: skip
upstream, nothing_left_behind = DOOR.fixtures()
OWNERS = (CustomDPOTrainer, CustomKTOTrainer, CustomSeq2SeqTrainer, BaseTrainer, trainer_utils)


def test_what_is_replaced_and_restored():
    before = DOOR.everything()
    with rlkernel.patch_llamafactory() as patch:
        for place, op in (
            ("dpo.trainer.CustomDPOTrainer.concatenated_forward", "linear_logprob"),
            ("dpo.trainer.CustomDPOTrainer.dpo_loss", "preference_loss"),
            ("kto.trainer.CustomKTOTrainer.forward", "linear_logprob"),
            ("sft.trainer.CustomSeq2SeqTrainer.compute_loss", "linear_logprob"),
            ("dpo.trainer.get_batch_logps", "logprob"),
            ("kto.trainer.get_batch_logps", "logprob"),
        ):
            assert f"llamafactory.train.{place} -> rlkernel.{op}" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused and not patch.waiting
        assert launcher.__file__.endswith(os.path.join("llamafactory", "worker.py"))
        DOOR.check_one_at_a_time(patch)
    DOOR.check_restored(before)


def test_the_example_of_the_docstring():
    DOOR.check_example()


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_llamafactory([part]) as patch:
        places = " ".join(patch.replaced)
        for name, mark in (
            ("logprobs", "get_batch_logps"), ("dpo", "CustomDPOTrainer"), ("kto", "CustomKTOTrainer"),
            ("sft", "CustomSeq2SeqTrainer"), ("v1", "BaseTrainer"),
        ):  # fmt: skip
            assert (mark in places) == (name == part), places
        DOOR.check_parts(part)
    patch.undo()


def test_refusals(monkeypatch):
    def become(changed, found):
        if found is None:
            changed.setitem(sys.modules, "llamafactory", None)
        else:
            changed.setattr(llamafactory, "__version__", found)

    DOOR.check_refusals(monkeypatch, become, ["0.9.4", "0.10.0"])


@pytest.mark.parametrize(
    "part, owner, name",
    [
        ("logprobs", trainer_utils, "get_batch_logps"),
        ("dpo", CustomDPOTrainer, "concatenated_forward"),
        ("dpo", CustomDPOTrainer, "simpo_loss"),
        ("kto", CustomKTOTrainer, "forward"),
        ("sft", CustomSeq2SeqTrainer, "compute_loss"),
        ("v1", BaseTrainer, "compute_log_probs"),
    ],
)
def test_what_is_not_as_it_was(monkeypatch, caplog, part, owner, name):
    kept = {
        "dpo": "llamafactory.train.kto.trainer.CustomKTOTrainer.forward",
    }.get(part, "llamafactory.train.dpo.trainer.CustomDPOTrainer.concatenated_forward")
    before = DOOR.everything()
    with monkeypatch.context() as changed:
        changed.setattr(owner, name, lambda self, other: None)
        with pytest.raises(PatchError, match=f"{part} cannot be replaced: .*{name} must take "):
            rlkernel.patch_llamafactory()
        assert not LlamafactoryPatch.in_place() and switch.SWITCH not in os.environ
        DOOR.listen(monkeypatch, caplog)
        with rlkernel.patch_llamafactory(strict=False) as patch:
            assert list(patch.refused) == [part] and kept in patch.replaced
            assert f"leaves {part} to LLaMA-Factory" in caplog.text
    assert all(before[key] is value for key, value in DOOR.everything().items() if key in before)


def test_a_loss_that_is_none_of_trls(monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(CustomDPOTrainer, "dpo_loss", lambda self: None, raising=False)
        with pytest.raises(PatchError, match="dpo_loss must be TRL's, got one of its own"):
            rlkernel.patch_llamafactory()
    with monkeypatch.context() as changed:
        changed.setattr(CustomDPOTrainer.__mro__[1], "dpo_loss", lambda self: None)
        with pytest.raises(PatchError, match="dpo_loss must take .* or .*, got .self"):
            rlkernel.patch_llamafactory()
    assert not LlamafactoryPatch.in_place()


def test_somebody_else(monkeypatch):
    DOOR.check_somebody_else(
        monkeypatch,
        lambda others: others.setattr(CustomKTOTrainer, "forward", lambda self: None),
        "CustomKTOTrainer.forward",
    )


def test_the_switch(monkeypatch, caplog):
    DOOR.check_switch(monkeypatch)


def test_asked_once(monkeypatch, caplog):
    DOOR.check_asked_once(monkeypatch, caplog, install.register, "kto")


def test_a_wrong_name(monkeypatch, caplog):
    DOOR.check_wrong_name(monkeypatch, caplog, install.register)


@pytest.mark.parametrize("launcher", [launcher, launcher_of_v1], ids=["launcher", "v1"])
def test_what_torchrun_is_told(monkeypatch, launcher):
    """In the environment that it hands on, and by the file that it runs."""
    told = []

    def start(command, env, check):
        told.append((list(command), env))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(launcher.subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", "run.yaml"])
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    with rlkernel.patch_llamafactory(["dpo"]), pytest.raises(SystemExit):
        launcher.launch()
    (command, environment), *others = told
    assert not others and command[0] == "torchrun" and install.WORKER in command and "run.yaml" in command
    assert environment[switch.SWITCH] == "dpo" and environment[switch.STRICT] == "1"


def test_the_command(monkeypatch, capsys):
    """In the place of ``llamafactory-cli``."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of its module, which other tests have imported
        __main__.main(["version"])
    assert "Welcome to LLaMA Factory" in capsys.readouterr().out
    assert LlamafactoryPatch.in_place().parts == switch.PARTS
    assert rlkernel.unpatch_all() == [DOOR.path] and os.environ[switch.SWITCH] == "1"


def test_nothing_is_imported_where_nothing_is_asked():
    check_idle_entry_point("llamafactory")


@pytest.fixture
def forgotten(monkeypatch):
    """A module that nobody has imported yet."""
    name = contract.HOMES["kto"]
    monkeypatch.delitem(sys.modules, name)
    parent = sys.modules[name.rpartition(".")[0]]
    monkeypatch.delattr(parent, "trainer")
    return name


def test_what_is_imported_later(forgotten):
    with rlkernel.patch_llamafactory(["kto"]) as patch:
        assert patch.waiting == {"kto": forgotten} and not patch.refused
        module = importlib.import_module(forgotten)
        assert not patch.waiting
        assert module.CustomKTOTrainer.forward.__module__ == "rlkernel"
    assert module.CustomKTOTrainer.forward.__module__ == forgotten


def test_undone_waits_for_nothing(forgotten):
    module = DOOR.check_undone_waits("kto", importlib.import_module)
    assert module.CustomKTOTrainer.forward.__module__ == forgotten
