"""axolotl's trainers, stock and with the plugin: the same logs and weights."""

import earlier
import pytest
import runs
import trl.trainer.utils as utils
from earlier import Widest

import rlkernel

SCORES = "GRPOTrainer._get_per_token_logps_and_entropies"
LOSSES = {
    "dpo": "DPOTrainer._compute_loss",
    "ipo": "DPOTrainer._compute_loss",
    "kto": "KTOTrainer._compute_loss",
}


def check_plugin(model_path, rl, calls, metric=2e-5, **options):
    """A training with the plugin is that without it, and everything is as it was behind it."""
    stock = runs.trained(model_path, rl, **options)
    helpers = dict(vars(utils))
    ours = runs.trained(model_path, rl, plugin=True, **options)
    patch = runs.plugin().patch
    assert not patch.active and dict(vars(utils)) == helpers
    assert (patch.calls | patch.trl.calls) == calls
    assert not patch.fallbacks and not patch.trl.fallbacks
    earlier.check_same(ours, stock, metric)
    return stock


def test_grpo(model_path):
    stock = check_plugin(model_path, "grpo", {SCORES: 4})
    packed = runs.trained(model_path, "grpo", plugin=True, rlkernel_prefix_sharing="require")
    patch = runs.plugin().patch
    assert patch.trl.prefix.ratio > 1.2 and not patch.trl.fallbacks
    earlier.check_same(packed, stock)


@pytest.mark.parametrize("rl", LOSSES)
def test_preferences(model_path, rl):
    """Two models are loaded, the reference last, and each time axolotl replaces functions of TRL."""
    check_plugin(model_path, rl, {LOSSES[rl]: 2}, 1e-4 if rl == "kto" else 2e-5)


@pytest.mark.parametrize("rl", ["orpo", "simpo"])
def test_preferences_whose_logits_are_made(model_path, rl):
    check_plugin(model_path, rl, {"selective_log_softmax": 2})


@pytest.mark.parametrize("rl", ["grpo", "dpo"])
def test_no_logits_are_made(model_path, rl):
    cfg = runs.config(model_path, rl, plugin=True, micro_batch_size=16)
    trainer = runs.made(cfg)
    loss, seen = trainer._compute_loss, []

    def watched(*args, **kwargs):
        with Widest() as widest:
            result = loss(*args, **kwargs)
        seen.append(widest.rows)
        return result

    trainer._compute_loss = watched
    with rlkernel.workspace.limited(2**20):  # which has room for tiles of 128 rows
        trainer.train()
    runs.plugin().post_train(cfg, trainer.model)
    assert seen and max(seen) <= 128
