"""What rlkernel.patch_swift() replaces in the real SWIFT, restores and refuses; and SWIFT's processes."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import swift
import swift_cases
import torch
from swift.rl_core import advantage
from swift.rlhf_trainers import grpo_trainer, rlhf_mixin
from swift_cases import DOOR, nothing_left_behind, upstream
from trl.trainer import utils

import rlkernel
from rlkernel.integrations.swift import SwiftPatch, grpo, install, switch
from rlkernel.integrations.swift.__main__ import main
from rlkernel.integrations.swift.models import shared_out

assert nothing_left_behind and upstream  # fixtures of every test here
METHOD = "_get_per_token_logps_and_entropies_single"
FIRST, ELSEWHERE = grpo_trainer.GRPOTrainer, "swift.rlhf_trainers.grpo_trainer.GRPOTrainer"


def test_what_is_replaced_and_restored():
    before = DOOR.everything()
    with rlkernel.patch_swift() as patch:
        for place, new in (
            ("trl.trainer.utils.selective_log_softmax", "logprob"),
            ("swift.rlhf_trainers.rlhf_mixin.selective_log_softmax", "logprob"),
            ("trl.experimental.cpo.cpo_trainer.selective_log_softmax", "logprob"),
            (f"{ELSEWHERE}.{METHOD}", "linear_logprob"),
            ("swift.rlhf_trainers.dpo_trainer.DPOTrainer.concatenated_forward", "linear_logprob"),
            ("swift.rlhf_trainers.kto_trainer.KTOTrainer.forward", "linear_logprob"),
            ("swift.rlhf_trainers.rlhf_mixin.RLHFTrainerMixin.concatenated_forward", "linear_logprob"),
            ("swift.rlhf_trainers.gkd_trainer.gkd_loss", "divergence"),
            ("swift.rlhf_trainers.gkd_loss.jsd_loss", "divergence"),
            ("swift.rlhf_trainers.grpo_trainer.compute_advantages", "group_advantages"),
        ):
            assert patch.replaced[place] == f"rlkernel.{new}"
        assert "<locals>" not in str(patch) and not patch.refused and not patch.waiting
        assert advantage.compute_advantages is grpo_trainer.compute_advantages
        assert rlhf_mixin.selective_log_softmax is utils.selective_log_softmax
        DOOR.check_one_at_a_time(patch)
    DOOR.check_restored(before)


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_swift([part]) as patch:
        places = " ".join(patch.replaced)
        assert (METHOD in places) == ("KTOTrainer" in places) == (part == "fused_head")
        assert ("compute_advantages" in places) == (part == "advantages")
        assert ("jsd_loss" in places) == (part == "losses")
        # it looks up what was scored
        assert ("selective_log_softmax" in places) == (part in ("logprobs", "fused_head"))
        DOOR.check_parts(part)
    patch.undo()


def test_the_docstring_example():
    DOOR.check_example()


def become(monkeypatch, version):
    if version is None:
        monkeypatch.setitem(sys.modules, "swift", None)
    else:
        monkeypatch.setitem(vars(swift), "__version__", version)


def test_refusals(monkeypatch):
    DOOR.check_refusals(monkeypatch, become, ("4.5.0", "4.7.0"))


def test_a_changed_function(monkeypatch, caplog):
    def change(changed):
        changed.setattr(FIRST, METHOD, lambda self, model, model_inputs: None)

    name, kept = f"GRPOTrainer.{METHOD}", "swift.rlhf_trainers.kto_trainer.KTOTrainer.forward"
    DOOR.check_change(monkeypatch, caplog, change, name, kept)


def test_what_somebody_has_put_around_a_function_stays(monkeypatch):
    DOOR.check_around(monkeypatch, advantage, "compute_advantages")


def test_somebody_else(monkeypatch):
    def replace(others):
        others.setattr(FIRST, METHOD, lambda *_: None)

    DOOR.check_somebody_else(monkeypatch, replace, METHOD)


def test_a_helper_of_somebody_else_is_not_looked_up(files, monkeypatch):
    """Who replaces TRL's helper behind the patch has it called with logits."""
    stock, theirs = swift_cases.stock("dpo", files), rlhf_mixin.selective_log_softmax
    with rlkernel.patch_swift() as patch, monkeypatch.context() as later:
        later.setattr(rlhf_mixin, "selective_log_softmax", lambda *x: theirs(*x))
        with pytest.warns(UserWarning, match="rlhf_mixin.selective_log_softmax is somebody else's"):
            ours = swift_cases.trained("dpo", files)
    assert not patch.calls
    swift_cases.check_same(ours, stock)


def test_what_shares_rows_out_is_left(monkeypatch):
    """Ulysses and rings, whose methods ask for the labels of a rank's rows behind its model's call."""
    template = types.SimpleNamespace(sequence_parallel_size=2, padding_free=False)
    trainer = types.SimpleNamespace(template=template)
    assert "sequence parallelism" in shared_out(trainer)
    asked = []
    monkeypatch.setattr(
        FIRST, "_get_logps_via_sp", lambda *x, **_: asked.append(x) or (torch.zeros(2, 3), None)
    )
    trainer = object.__new__(FIRST)
    trainer.__dict__.update(template=template)
    batch = types.SimpleNamespace(logits_to_keep=3, seq_lengths=None)
    with rlkernel.patch_swift() as patch, pytest.warns(UserWarning, match="leaves .* sequence parallelism"):
        found, _ = getattr(trainer, METHOD)(None, {"input_ids": torch.ones(2, 5)}, batch)
    assert found.shape == (2, 3) and len(asked) == 1 and len(patch.fallbacks) == 1
    template.sequence_parallel_size = 1
    assert shared_out(trainer) is None
    assert "encoder" in shared_out(types.SimpleNamespace(template=template, is_encoder_decoder=True))


def test_only_completions_are_scored():
    ids = torch.arange(10, 22).view(2, 6)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    batch = types.SimpleNamespace(logits_to_keep=3, completion_mask=mask, seq_lengths=None)
    found = grpo.completion_labels(ids, batch, padding_free=False)
    assert found.tolist() == [[-100, -100, 13, 14, -100, -100], [-100, -100, -100, 20, 21, -100]]
    packed = types.SimpleNamespace(  # the end of a sample, and one with its prompt
        logits_to_keep=5, seq_lengths=torch.tensor([2, 3]),
        completion_mask=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]).bool(),
    )  # fmt: skip
    found = grpo.completion_labels(torch.arange(10, 17)[None], packed, padding_free=True)
    assert found.tolist() == [[-100, 12, 13, -100, 15, 16, -100]]
    assert grpo.kept(found, {"logits_to_keep": 6}).shape == (1, 6) and grpo.kept(found, {}) is not None


# the switch


def test_the_variable(monkeypatch):
    DOOR.check_switch(monkeypatch)


def test_the_variable_is_followed_once(monkeypatch, caplog):
    DOOR.check_asked_once(monkeypatch, caplog, install.register, "advantages")


def test_a_wrong_name(monkeypatch, caplog):
    DOOR.check_wrong_name(monkeypatch, caplog, install.register)


def test_swifts_own_option_takes_the_plugin(files, capsys):
    """In a process whose trainers are there; another one waits for them."""
    main(["--plugin"])
    path = capsys.readouterr().out.strip()
    ours = swift_cases.trained("dpo", files, external_plugins=[path])
    patch = SwiftPatch.in_place()
    assert patch.parts == switch.PARTS and set(patch.calls) == {"DPOTrainer.concatenated_forward"}
    assert rlkernel.unpatch_all() == [DOOR.path]
    swift_cases.check_same(ours, swift_cases.stock("dpo", files))


WATCHED = """
import atexit, swift_cases
from rlkernel.integrations.swift import SwiftPatch
atexit.register(lambda: print("CALLS", dict(SwiftPatch.in_place().calls), flush=True))
"""


def test_rlkernels_command_on_two_ranks(files):
    """Which SWIFT's command starts by torchrun; here with a plugin of a user, and what it imports."""
    plugin = files / "watched.py"
    plugin.write_text(WATCHED)
    helpers = [Path(__file__).parents[i] for i in range(3)]
    path = os.pathsep.join([os.environ["PYTHONPATH"], *map(str, helpers)])
    told = swift_cases.arguments("grpo", files, max_steps=1, external_plugins=plugin, ddp_backend="gloo")
    done = subprocess.run(
        [sys.executable, "-m", "rlkernel.integrations.swift", "rlhf", *told],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "2"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("CALLS") == 2 and done.stdout.count("'compute_advantages': 1") == 2
    assert done.stdout.count(f"'GRPOTrainer.{METHOD}'") == 2


def test_rlkernels_command_has_but_one():
    with pytest.raises(SystemExit, match="usage: python -m rlkernel.integrations.swift rlhf"):
        main(["sft"])
