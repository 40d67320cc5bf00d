"""gae against verl, TRL, OpenRLHF, SkyRL, slime and NeMo-RL: their own functions, and TRL's loop."""

import types

import pytest
import torch
from accuracy import error
from backends import running
from bitwise import assert_equal
from gae_cases import ON_EVERY_BACKEND, run, wide
from peer_sources import load

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.reference.gae import make_inputs

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0)])
@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device, gamma, lam):
    """verl's values and mask, where the mask is set; under it verl leaves what is carried, and we 0."""
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")
    inputs = make_inputs(6, 200, device=device, masked=0.3)
    mask = inputs["mask"]
    advantages, returns = verl.compute_gae_advantage_return(
        inputs["rewards"], inputs["values"], mask.float(), gamma, lam
    )
    ours = run(backend, **inputs, gamma=gamma, lam=lam)
    whitened = rlkernel.whiten(ours.advantages, mask)
    torch.testing.assert_close(ours.returns[mask], returns[mask], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(whitened[mask], advantages[mask], rtol=2e-5, atol=2e-5)
    assert (ours.returns[~mask] == 0).all() and (returns[~mask] != 0).any()
    with running(backend):
        assert_equal(
            "whiten=True",
            rlkernel.gae(**inputs, gamma=gamma, lam=lam, whiten=True).advantages,
            rlkernel.whiten(ours.advantages, mask),
        )


@ON_EVERY_BACKEND
def test_reinforce_plus_plus_returns_are_gae_without_values(backend, device):
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")
    inputs = make_inputs(6, 200, device=device, masked=0.3)
    config = type("Config", (), {"gamma": 0.98})
    advantages, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        inputs["rewards"], inputs["mask"].float(), config=config
    )
    zeros = torch.zeros_like(inputs["values"])
    ours = run(backend, inputs["rewards"], zeros, inputs["mask"], gamma=0.98, lam=1.0)
    torch.testing.assert_close(ours.returns, returns, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        rlkernel.whiten(ours.returns, inputs["mask"]), advantages, rtol=2e-5, atol=2e-5
    )


def trl_loop(rewards, values, gamma, lam):
    """The loop of TRL's PPOTrainer, which has no mask: padding holds zeros there."""
    carry, reverse = 0, []
    for t in reversed(range(rewards.shape[1])):
        next_values = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        carry = delta + gamma * lam * carry
        reverse.append(carry)
    advantages = torch.stack(reverse[::-1], axis=1)
    return advantages, advantages + values


@ON_EVERY_BACKEND
def test_trl_says_the_same(backend, device):
    inputs = make_inputs(4, 150, device=device, masked=0)
    expected = trl_loop(inputs["rewards"], inputs["values"], 0.99, 0.9)
    for a, b in zip(run(backend, **inputs, gamma=0.99, lam=0.9), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def their_gae(name, inputs, gamma, lam):
    """The walks of frameworks that do not step over a hole, from their own sources."""
    rewards, values, mask = inputs["rewards"], inputs["values"], inputs["mask"].to(inputs["rewards"].dtype)
    if name == "openrlhf":
        kind = load(
            "openrlhf", "openrlhf/trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker", ray=None
        )
        walk = kind.RemoteExperienceMaker.get_advantages_and_returns
        return walk(None, values, rewards, mask, gamma, lam)
    if name == "skyrl":
        path = "skyrl/backends/skyrl_train/utils"
        tools = load("skyrl", f"{path}/torch_utils.py", "masked_mean")
        names = "compute_gae_advantage_return", "masked_whiten", "masked_var"
        return load("skyrl", f"{path}/ppo_utils.py", *names, **vars(tools)).compute_gae_advantage_return(
            rewards, values, mask, gamma, lam
        )
    tools = load(
        "slime", "slime/utils/ppo_utils.py", "vanilla_gae", "chunked_gae", "chunked_discounted_returns"
    )
    return getattr(tools, name)(rewards, values, gamma, lam)


@pytest.mark.parametrize("name", ["openrlhf", "skyrl", "vanilla_gae", "chunked_gae"])
def test_openrlhf_skyrl_and_slime_say_the_same(name):
    inputs = {k: wide(x) for k, x in make_inputs(4, 60, masked=0.3).items()}
    advantages, returns = their_gae(name, inputs, 0.97, 0.9)
    options = {"gamma": 0.97, "lam": 0.9}
    if name == "openrlhf":
        ours = rlkernel.gae(**inputs, holes="zero", **options)
        expected = [torch.where(inputs["mask"], x, 0) for x in (advantages, returns)]
    else:  # what stands under the mask is part of the walk
        ours = rlkernel.gae(inputs["rewards"], inputs["values"], **options)
        whitened = rlkernel.whiten(ours.advantages, inputs["mask"]) if name == "skyrl" else ours.advantages
        kept = inputs["mask"] if name == "skyrl" else torch.ones_like(inputs["mask"])
        ours, expected = (whitened * kept, ours.returns), (advantages * kept, returns)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_nemo_rl_says_the_same():
    """Its walk steps over holes; a lambda for each response by its length, another one for the returns."""
    inputs = {k: wide(x) for k, x in make_inputs(4, 60, masked=0.3).items()}
    kind = load(
        "nemo-rl", "nemo_rl/algorithms/advantage_estimator.py", "GeneralizedAdvantageEstimator"
    ).GeneralizedAdvantageEstimator
    config = {"gae_lambda": 0.9, "gae_gamma": 0.97, "normalize_advantages": False, "gae_lambda_value": 1.0}
    config |= {"gae_lambda_policy": None, "length_adaptive_alpha": 0.05}
    loss = {"use_kl_in_reward": False, "reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3"}
    theirs = kind(config, types.SimpleNamespace(**loss))
    theirs._build_token_level_rewards = lambda *_: inputs["rewards"] * inputs["mask"]
    advantages, returns = theirs.compute_advantage(None, None, inputs["mask"].double(), inputs["values"])
    lam = 1 - 1 / (0.05 * inputs["mask"].sum(1).float()).clamp(min=1)
    assert len(lam.unique()) > 1
    ours = rlkernel.gae(**inputs, gamma=0.97, lam=lam, return_lam=1.0)
    torch.testing.assert_close(ours.advantages, advantages)
    torch.testing.assert_close(ours.returns, torch.where(inputs["mask"], returns, 0))


def test_wrong_returns_would_be_seen():
    """The mutant of the tests here: verl's own reading of the mask, with the value of the next token."""
    inputs = make_inputs(3, 50, masked=0.4)
    right = rlkernel.gae(**inputs).advantages
    wrong = trl_loop(inputs["rewards"], inputs["values"], 1.0, 0.95)[0] * inputs["mask"]
    assert error(right, wrong) > 1e-2
