"""SWIFT's advantages beside rlkernel's in their place."""

import functools

import pytest
import torch
from swift.rl_core import advantage
from swift_cases import DOOR, nothing_left_behind, upstream

import rlkernel
from rlkernel.integrations.swift.advantages import ESTIMATORS, SCALES

assert nothing_left_behind and upstream  # fixtures of every test here
NAME = "compute_advantages"


def given(groups=5, size=4, functions=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(groups * size, functions, generator=g)
    return rewards, torch.tensor([1.0, 0.5, 2.0])[:functions], torch.rand(groups * size, generator=g)


def computed(*args, **options):
    return advantage.compute_advantages(*args, **options)


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_are_the_same(estimator, scale, size):
    rewards, weights, kl = given(size=size)
    options = {"advantage_estimator": estimator, "scale_rewards": scale}
    for more in ({}, {"kl_in_reward": True, "beta": 0.1, "kl_values": kl}):
        stock = computed(rewards, weights, size, **options, **more)
        exact = computed(rewards.double(), weights.double(), size, **options, **more)
        with rlkernel.patch_swift(["advantages"]) as patch:
            ours = computed(rewards, weights, size, **options, **more)
        assert patch.calls == {NAME: 1} and not patch.fallbacks
        if size > 1 or scale != "gdpo":  # of one response torch has no deviation
            torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours[0], stock[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(ours[1], stock[1]) and ours[0].dtype == stock[0].dtype


def test_a_function_that_has_not_scored_a_response():
    rewards, weights, _ = given()
    rewards[3, 1] = float("nan")
    stock = computed(rewards, weights, 4)
    with rlkernel.patch_swift(["advantages"]) as patch:
        ours = computed(rewards, weights, 4)
    assert patch.calls == {NAME: 1}
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"num_generations": 3}, "num_generations does not divide"),
        ({"num_generations": 4.0}, "num_generations does not divide"),
        ({"advantage_estimator": "opo"}, "advantage_estimator or scale_rewards is unknown"),
        ({"reward_weights": torch.ones(2)}, "a weight for each function"),
        ({"rewards_per_func": torch.ones(8, 3, dtype=torch.int64)}, "rewards_per_func is torch.int64"),
        ({"rewards_per_func": torch.full((8, 3), float("inf"))}, "a reward is not finite"),
        ({"rewards_per_func": torch.full((8, 3), float("nan")), "scale_rewards": "gdpo"}, "without a reward"),
        ({"kl_in_reward": True, "beta": 0.1, "kl_values": torch.ones(1)}, "kl_values are not one"),
        ({"kl_in_reward": True, "beta": 0.1, "kl_values": [0.0] * 20}, "kl_values is no tensor"),
    ],
)
def test_what_is_left_to_swift(change, reason):
    rewards, weights, _ = given()
    options = {"rewards_per_func": rewards, "reward_weights": weights, "num_generations": 4} | change
    with pytest.warns(UserWarning, match="leaves compute_advantages to SWIFT"):
        DOOR.check_left(functools.partial(computed, **options), reason, ["advantages"])


@pytest.mark.parametrize("scale, noise", [("gdpo", 0.4), ("group", 5e-4)])
def test_equal_rewards_have_no_advantage(scale, noise):
    """Of SWIFT they have what the mean of fp32 has lost, divided by a deviation of that size."""
    others = torch.rand(8, 1, generator=torch.Generator().manual_seed(0))
    rewards, weights = torch.cat([torch.full((8, 1), 0.7), others]), torch.ones(1)
    stock, _ = computed(rewards, weights, 8, scale_rewards=scale)
    with rlkernel.patch_swift(["advantages"]):
        found, _ = computed(rewards, weights, 8, scale_rewards=scale)
    assert (stock[:8] > noise).all() and found[:8].abs().max() < 1e-6
    assert scale == "gdpo" or not found[:8].any()


def test_a_reward_at_the_mean_of_its_group_has_the_sign_of_the_exact_difference():
    """By which ``--loss_type real`` splits a group; SWIFT's, whose fp32 sum has lost it, is 0."""
    group = torch.tensor([[1.8], [0.1], [0.5], [0.8]])
    exact = (group.double() - group.double().mean()).flatten()
    stock, _ = computed(group, torch.ones(1), 4, scale_rewards="none")
    with rlkernel.patch_swift(["advantages"]):
        found, _ = computed(group, torch.ones(1), 4, scale_rewards="none")
    assert 0 < exact[3] < 1e-7 and stock[3] == 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
