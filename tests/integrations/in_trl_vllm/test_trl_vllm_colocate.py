"""GRPOTrainer with an engine of vLLM in its own process: ten steps with rlkernel under both, and without."""

import pytest
import runs
import torch
from vllm.v1.sample.sampler import Sampler

import rlkernel

STOCK = Sampler.forward


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    return runs.train(model, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def patched(model, tmp_path_factory):
    with rlkernel.patch_trl(vllm="require") as patch:
        assert patch.vllm is None and Sampler.forward is STOCK  # no trainer has asked for it
        run = runs.train(model, tmp_path_factory.mktemp("patched"))
        assert patch.vllm.active and Sampler.forward is not STOCK
        run.calls = dict(patch.vllm.calls) | dict(patch.calls)
        assert not patch.fallbacks and not patch.vllm.fallbacks and not patch.vllm.refused
    assert Sampler.forward is STOCK
    return run


def test_every_token_was_drawn_and_scored_by_rlkernel(patched):
    tokens = max(len(ids) for rollout in patched.rollouts for ids in rollout[1])
    assert patched.calls["Sampler.forward"] == runs.STEPS * tokens
    assert patched.calls["_ChunkedLogProbFunction"] >= 2 * runs.STEPS  # old logprobs and the loss


@pytest.mark.parametrize("name", ["stock", "patched"])
def test_the_engine_has_the_weights_of_the_trainer_after_each_step(name, request):
    synced = request.getfixturevalue(name).synced
    assert len(synced) == runs.STEPS
    for step, (before, after) in enumerate(synced):
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= after.keys()
        assert all(after.values()), step
        assert all(before.values()) == (step == 0), step  # the step before has changed them


def test_sampling_and_training_agree_as_in_stock(stock, patched):
    """On the same fp32 weights the two differ by the rounding of two attentions."""
    for run in (stock, patched):
        assert len(run.log) == runs.STEPS
        assert max(run.column(f"{runs.DIFFERENCE}/max")) < 5e-5
        assert max(abs(x - 1) for x in run.column(f"{runs.RATIO}/mean")) < 1e-5
    for name, run in (("stock", stock), ("patched", patched)):
        mean, largest = (max(run.column(f"{runs.DIFFERENCE}/{kind}")) for kind in ("mean", "max"))
        print(f"{name}: sampling_logp_difference mean {mean:.1e}, max {largest:.1e}")


def test_both_learn(stock, patched):
    """From other draws, so at another speed; the next test compares step by step."""
    for run in (stock, patched):
        rewards = run.column("reward")
        print([round(x, 3) for x in rewards])
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_the_same_rollouts_make_the_same_steps_of_stock(patched, model, tmp_path):
    replayed = runs.train(model, tmp_path, generation=runs.Replay(patched.rollouts))
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert patched.column(name) == pytest.approx(replayed.column(name), rel=1e-3, abs=1e-5), name
    assert max(abs(x) for x in patched.column("loss")) > 1e-4
    for name, weight in replayed.weights.items():
        torch.testing.assert_close(patched.weights[name], weight, rtol=0, atol=2e-4)
