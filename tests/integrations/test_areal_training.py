"""Steps of PPO by AReaL's engine and actor, all of it: what they log, and the weights that they leave."""

import areal_engines as engines
import pytest
import torch
from areal_cases import load, nothing_left_behind, own_logging, upstream
from test_areal_engine import one_process, saved

import rlkernel

assert nothing_left_behind and upstream and one_process and saved  # fixtures of every test here
pytestmark = pytest.mark.filterwarnings("ignore")
cli_args = load("areal.api.cli_args")

RUNS = {
    "grpo": {
        "reward_norm": cli_args.NormConfig(mean_level="group", std_level="group", group_size=2),
        "eps_clip_higher": 0.28, "c_clip": 3.0,
    },
    "decoupled": {
        "use_decoupled_loss": True, "kl_ctl": 0.1, "discount": 0.95, "gae_lambda": 0.9,
        "adv_norm": cli_args.NormConfig(mean_level="batch", std_level="batch"),
        "rejection_sampling": cli_args.RejectionSamplingConfig(
            level="token", action="clamp", metric="ratio", upper=2.0
        ),
    },
    "sapo of sequences": {
        "use_sapo_loss": True, "use_decoupled_loss": False, "importance_sampling_level": "sequence",
    },
}  # fmt: skip


def rollouts(steps):
    for seed in range(steps):
        given = engines.batch(seed, 6)
        g = torch.Generator().manual_seed(seed + 50)
        shape = given["input_ids"].shape
        yield given | {
            "logprobs": -5 - 0.2 * torch.rand(shape, generator=g), "rewards": torch.randn(6, generator=g),
            "versions": torch.where(given["loss_mask"], 0, -1),
        }  # fmt: skip


def trained(path, options, steps=3):
    """After each step what was logged, and the weights at the end."""
    made, logged = engines.make(path, ppo_n_minibatches=2, **options), []
    tracker = load("areal.utils.stats_tracker")
    tracker.export_all()  # what others have left there
    for given in rollouts(steps):
        (scores,) = made.compute_logp([given])
        (given,) = made.compute_advantages([given | {"prox_logp": scores}])
        with own_logging():
            made.ppo_update([given])
        logged.append(tracker.export_all())
    return logged, {name: p.full_tensor() for name, p in made.model.named_parameters()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run(saved, name):
    stock, weights = trained(saved, RUNS[name])
    with rlkernel.patch_areal() as patch:
        ours, found = trained(saved, RUNS[name])
        # each step scores once, and trains twice
        assert patch.calls == {"FSDPEngine": 9, "PPOActor._compute_advantages": 3}, patch.calls
        assert not patch.fallbacks
    for step, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert a.keys() == b.keys() and len(a) > 30
        assert any("vocab_max_logits" in key for key in a)
        for key, value in b.items():
            apart = abs(a[key] - value)
            assert a[key] == value or apart <= 2e-4 * max(1.0, abs(value)), (step, key, a[key], value)
    start = engines.make(saved).model.state_dict()
    for key, value in weights.items():
        moved = (value - start[key].full_tensor()).abs().max()
        assert moved > 0 and (found[key] - value).abs().max() <= 0.05 * moved, key
