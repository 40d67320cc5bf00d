"""The plugin as axolotl's manager loads it: its options, when it patches, and what it leaves alone."""

import logging

import axolotl
import pytest
import runs
import trl
import trl.trainer.utils as utils
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOSequenceParallelTrainer
from axolotl.monkeypatch.trainer import utils as axolotls
from pydantic import ValidationError

import rlkernel
from rlkernel import doctor
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.axolotl import AxolotlPatch, contract, plugin
from rlkernel.integrations.trl import TrlPatch

OPTIONS = {
    "rlkernel_prefix_sharing": True,
    "rlkernel_prefix_min_ratio": 2,
    "rlkernel_dropout": "shared",
    "rlkernel_vllm": False,
    "rlkernel_strict": False,
}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert AxolotlPatch.in_place() is None and TrlPatch.in_place() is None


def test_its_options(model_path):
    cfg = runs.config(model_path, "grpo", plugin=True, **OPTIONS)
    assert {name: cfg[name] for name in OPTIONS} == OPTIONS
    made = runs.plugin()
    assert made.add_callbacks_pre_trainer(cfg, None) == []
    prefix = made.patch.trl.prefix
    assert prefix.min_ratio == 2 and prefix.shared_dropout and not prefix.required
    assert made.patch.trl.rollouts is None
    made.post_train(cfg, None)


@pytest.mark.parametrize(
    "option, value, said",
    [
        (
            "rlkernel_prefix_shearing",
            True,
            "options of rlkernel must be among .*got rlkernel_prefix_shearing",
        ),
        ("rlkernel_prefix_sharing", "perhaps", "rlkernel_prefix_sharing"),
        ("rlkernel_dropout", "none", "rlkernel_dropout"),
        ("rlkernel_prefix_min_ratio", 0.5, "rlkernel_prefix_min_ratio"),
    ],
)
def test_wrong_options(model_path, option, value, said):
    with pytest.raises(ValidationError, match=said):
        runs.config(model_path, "grpo", plugin=True, **{option: value})


def test_options_that_do_not_go_together(model_path):
    cfg = runs.config(model_path, "grpo", plugin=True, rlkernel_dropout="shared")
    with pytest.raises(ValueError, match="dropout must be 'own' without prefix_sharing"):
        runs.made(cfg)


def test_the_second_model_of_a_training(model_path, caplog):
    """axolotl replaces functions of TRL with each model: the patch comes behind the last, and is shown."""
    logging.getLogger("axolotl").propagate = True
    with caplog.at_level(logging.INFO, "axolotl"):
        cfg = runs.config(model_path, "dpo", plugin=True)
        runs.made(cfg)
    said = [
        text for text in caplog.messages if "Patched trl.trainer.utils" in text or "patch_axolotl" in text
    ]
    assert utils.selective_log_softmax is not axolotls.selective_log_softmax
    runs.plugin().post_train(cfg, None)
    assert utils.selective_log_softmax is axolotls.selective_log_softmax
    assert said[0].startswith("Patched") and said[-1].startswith("<rlkernel.patch_axolotl:")
    assert sum(text.startswith("Patched") for text in said) >= 2


def test_a_training_behind_one_that_failed(model_path):
    cfg = runs.config(model_path, "dpo", plugin=True)
    failed = runs.plugin()
    failed.add_callbacks_pre_trainer(cfg, None)
    first = failed.patch
    assert first.active
    cfg = runs.config(model_path, "dpo", plugin=True)
    assert not first.active and runs.plugin() is not failed
    runs.plugin().add_callbacks_pre_trainer(cfg, None)
    assert failed.patch is not first and failed.patch.active
    failed.post_train(cfg, None)


def test_what_somebody_has_replaced_since(model_path, caplog, monkeypatch):
    """A training that is over has not failed."""
    logging.getLogger("axolotl").propagate = True
    cfg = runs.config(model_path, "dpo", plugin=True)
    made = runs.plugin()
    made.add_callbacks_pre_trainer(cfg, None)
    with monkeypatch.context() as here:
        here.setattr(trl.DPOTrainer, "_compute_loss", print)
        made.post_train(cfg, None)
    assert "rlkernel stays in place" in caplog.text and made.patch.active
    made.post_train(cfg, None)


@pytest.mark.parametrize(
    "given, reason",
    [({"rl": None}, plugin.NO_RL), ({"rl": "dpo", "context_parallel_size": 2}, plugin.CONTEXT_PARALLEL)],
)
def test_what_is_left_to_axolotl(given, reason, caplog):
    logging.getLogger("axolotl").propagate = True
    made = plugin.RlkernelPlugin()
    made.add_callbacks_pre_trainer(runs.DictDefault(given), None)
    assert AxolotlPatch.in_place() is None and f"leaves everything to axolotl: {reason}" in caplog.text
    with pytest.raises(PatchError, match=f"must not be 'require' here: {reason[:20]}"):
        made.add_callbacks_pre_trainer(runs.DictDefault(given | {"rlkernel_prefix_sharing": "require"}), None)


def test_the_sequence_parallel_trainer_of_grpo():
    """It calls methods that TRL had before 1.0, and does not train with the TRL that axolotl pins."""
    names = AxolotlGRPOSequenceParallelTrainer._generate_and_score_completions.__code__.co_names
    assert "_get_per_token_logps" in names and "max_prompt_length" in names
    assert not hasattr(trl.GRPOTrainer, "_get_per_token_logps")
    assert not hasattr(AxolotlGRPOSequenceParallelTrainer, "max_prompt_length")


def test_in_and_out():
    trainer = __import__(contract.ASYNCHRONOUS, fromlist=["x"])
    before = [dict(vars(x)) for x in (trainer, trainer.AsyncGRPOTrainer, trl.DPOTrainer, utils)]
    with rlkernel.patch_axolotl() as patch:
        assert rlkernel.patch_axolotl() is patch and TrlPatch.in_place() is patch.trl
        assert f"{contract.ASYNCHRONOUS}.selective_log_softmax" in patch.replaced
        assert "trl.trainer.dpo_trainer.DPOTrainer._compute_loss" in patch.replaced
    assert before == [dict(vars(x)) for x in (trainer, trainer.AsyncGRPOTrainer, trl.DPOTrainer, utils)]
    assert patch.replaced == {}
    with patch.apply():
        assert patch.trl.active
    patch.undo()


def test_over_a_patch_of_trl():
    with rlkernel.patch_trl() as under:
        with rlkernel.patch_axolotl() as patch:
            assert patch.trl is under
        assert under.active


def test_neither_without_the_other(monkeypatch):
    monkeypatch.setattr(
        __import__(contract.ASYNCHRONOUS, fromlist=["x"]).AsyncGRPOTrainer,
        contract.FLAT_SCORES,
        lambda self: None,
    )
    with pytest.raises(PatchError, match=f"{contract.FLAT_SCORES} must take .self, model, .*got .self."):
        rlkernel.patch_axolotl()


@pytest.mark.parametrize("package, known", [(axolotl, ">=0.19,<0.20"), (trl, ">=1.0,<1.17")])
def test_other_versions(package, known, monkeypatch):
    monkeypatch.setattr(package, "__version__", "0.17.9")
    name = package.__name__
    with pytest.raises(
        PatchError, match=f"the version of {name} must be {known}, got 0.17.9; patch_{name}.strict"
    ):
        rlkernel.patch_axolotl()


def test_an_axolotl_that_has_not_been_run(monkeypatch):
    monkeypatch.setattr(axolotl, "__version__", "0.21.0")
    with pytest.warns(UserWarning, match="has been run with axolotl >=0.19,<0.20, and this is 0.21.0"):
        patch = rlkernel.patch_axolotl(strict=False)
    assert patch.active and patch.replaced
    patch.undo()
    assert not patch.active


def test_doctor_knows_it():
    found = doctor.examine("axolotl")
    assert found.installed == "0.19.0" and found.supported == contract.SUPPORTED
    assert found.reason is None and any("async_trainer" in path for path in found.replaced)


def test_its_example(model_path):
    """Of ``rlkernel.patch_axolotl``'s docstring."""
    trainer = runs.made(runs.config(model_path, "grpo"))
    with rlkernel.patch_axolotl() as patch:
        assert len(patch.replaced) > len(patch.trl.replaced)
        trainer.train()
    assert sum(patch.trl.calls.values()) == 4 and not patch.trl.fallbacks
