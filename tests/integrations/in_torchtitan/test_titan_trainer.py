"""torchtitan's trainer of RL, of which FusedLoss is the loss: all that it tells, and its weights."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import titan
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rlkernel.integrations.torchtitan import FusedLoss, fused


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory):
    """One rank, as torchtitan's launcher makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        store = tmp_path_factory.mktemp("ranks") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def check_alike(found, want, tolerance):
    """What two trainings told, and their weights."""
    (told, weights), (told_of_stock, weights_of_stock) = found, want
    for ours, theirs in zip(told, told_of_stock, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert weights.keys() == weights_of_stock.keys()
    for name, weight in weights_of_stock.items():
        torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("inner", ["grpo", "dapo"])
def test_a_training(inner, tied):
    config = titan.INNER[inner]
    ours = titan.trained(titan.fused(config), tied=tied)
    check_alike(ours, titan.trained(titan.chunked(config), tied=tied), 2e-5)
    check_alike(ours, titan.trained(config, tied=tied), 2e-5)
    assert any(round_of["loss/ratio_clipped_frac"] > 0 for round_of in ours[0] if "loss/mean" in round_of)


def test_a_training_in_bf16():
    """The logits are rounded to bf16 by stock alone, and the rest of the model is by both."""
    config = titan.INNER["grpo"]
    ours = titan.trained(titan.fused(config), dtype="bfloat16")
    check_alike(ours, titan.trained(titan.chunked(config), dtype="bfloat16"), 2e-2)


def test_it_has_the_head_and_makes_no_logits():
    actor = titan.trainer(titan.fused(titan.INNER["grpo"]))
    assert isinstance(actor.loss_fn, FusedLoss) and actor.loss_fn.lm_head is actor.model.lm_head
    assert actor.model._skip_lm_head


def test_recipes():
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    for loss in (
        titan.chunked(titan.INNER["dapo"], 8),
        titan.INNER["dapo"],
        titan.fused(titan.INNER["dapo"]),
    ):
        recipe = fused(PolicyTrainer.Config(loss=loss))
        assert type(recipe.loss) is FusedLoss.Config and recipe.loss.loss_fn == titan.INNER["dapo"]
    with pytest.raises(ValueError, match="recipe must have a loss of logits"):
        fused(recipe.training if hasattr(recipe.training, "traverse") else recipe.optimizer)


def test_every_recipe_of_its_own():
    """In a process of its own, which has no vLLM, no Monarch and no stand-ins for them."""
    here = Path(__file__).parent
    paths = [x for x in os.environ["PYTHONPATH"].split(os.pathsep) if Path(x) != here / "stand_ins"]
    done = subprocess.run(
        [sys.executable, here / "its_recipes.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 5, found
    for name, losses in found.items():
        ours = "rlkernel.integrations.torchtitan.fused_loss.FusedLoss.Config"
        assert losses == ["ChunkedLossWrapper.Config", ours], name


def test_a_batch_invariant_recipe_is_told_of_bits(monkeypatch, caplog):
    monkeypatch.setattr(
        "rlkernel.integrations.torchtitan.fused_loss.is_in_batch_invariant_mode", lambda: True
    )
    logger = logging.getLogger("rlkernel.integrations.torchtitan.fused_loss")
    monkeypatch.setattr(logger, "disabled", False)
    with caplog.at_level(logging.WARNING, logger.name):
        titan.fused(titan.INNER["grpo"]).build().set_lm_head(titan.head())
    assert "not the bits of the generator's" in caplog.text


def test_full_dtensor_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("torchtitan.distributed.utils._spmd_backend", "full_dtensor")
    loss = titan.fused(titan.INNER["grpo"]).build()
    with pytest.raises(ValueError, match="parallelism.spmd_backend of FusedLoss must be.*'full_dtensor'"):
        loss.set_lm_head(titan.head())
    assert loss.lm_head is None


def test_tokens_that_are_shared_out_are_refused():
    labels, inputs = titan.batch()
    loss = titan.fused(titan.INNER["grpo"]).build()
    loss.set_lm_head(titan.head())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    part = DTensor.from_local(titan.hidden_states(), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="hidden states of FusedLoss must be whole on every rank"):
        loss(part, labels, 19, **inputs)
    with pytest.raises(ValueError, match="labels of FusedLoss must be plain tensors"):
        loss(titan.hidden_states(), DTensor.from_local(labels, mesh, [Shard(0)]), 19, **inputs)
