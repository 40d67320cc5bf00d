"""What stands in the place of SkyRL's advantage estimators and of its KL, beside SkyRL's own."""

import math

import numpy as np
import pytest
import torch
from accuracy import check
from doors import random
from skyrl_cases import (
    algorithm,
    check_left_to_skyrl,
    nothing_left_behind,
    ppo_utils,
    rewards,
    upstream,
)

import rlkernel
from rlkernel.integrations.skyrl.advantages import ESTIMATORS

assert nothing_left_behind and upstream  # fixtures of every test here


def estimate(name, token_level, mask, names, config=None, values=None, **options):
    """As SkyRL's trainer asks for it."""
    config = config or algorithm()
    options = {"gamma": 0.9, "lambd": 0.8} | options
    return ppo_utils.compute_advantages_and_returns(
        token_level_rewards=token_level, response_mask=mask, index=names, adv_estimator=name, config=config,
        values=values, **options,
    )  # fmt: skip


def check_estimator(name, token_level, mask, names, values=None, **options):
    def run(dtype):
        of = (x.to(dtype) for x in (token_level, mask))
        return estimate(name, *of, names, values=None if values is None else values.to(dtype), **options)

    truth, stock = run(torch.float64), run(torch.float32)
    with rlkernel.patch_skyrl() as patch:
        got = run(torch.float32)
        assert patch.calls == {ESTIMATORS[name][0]: 1} and not patch.fallbacks, patch.fallbacks
    kept = mask != 0
    for i, of in enumerate(zip(got, stock, truth, strict=True)):
        check(f"{name} {i}", *(x[kept] for x in of))
        assert of[0].dtype == torch.float32
    assert not got[0][~kept].any()
    return got


@pytest.mark.parametrize("names", ["strings", "list", "numbers", "one group", "singletons"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
def test_groups_are_skyrls(name, names):
    token_level, mask, strings = rewards(4)
    index = {
        "strings": strings, "list": list(strings), "numbers": np.arange(12) % 5, "one group": np.zeros(12),
        "singletons": np.arange(12),
    }[names]  # fmt: skip
    check_estimator(name, token_level, mask, index)


def test_grpo_without_the_deviation():
    found = check_estimator("grpo", *rewards(4), grpo_norm_by_std=False)
    assert found[0].abs().sum() > 0


def test_groups_of_equal_rewards_have_no_advantage():
    """SkyRL divides what its mean has lost by 1e-6."""
    mask, names = torch.ones(6, 2), ["a"] * 6
    token_level = torch.zeros(6, 2)
    token_level[:, 1] = 0.1
    with rlkernel.patch_skyrl():
        assert not estimate("grpo", token_level, mask, names)[0].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_masks_of_other_types(name, dtype):
    token_level, mask, names = rewards(5)
    values = random(3, *mask.shape)
    want = estimate(name, token_level, mask, names, values=values)
    with rlkernel.patch_skyrl() as patch:
        got = estimate(name, token_level, mask.to(dtype), names, values=values)
        assert not patch.fallbacks
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine[mask > 0], theirs[mask > 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8), (0.0, 0.5)])
def test_gae_is_skyrls(gamma, lambd):
    """Over the tokens under the mask too, as SkyRL's walk."""
    token_level, mask, names = rewards(6)
    mask[2, 1] = 0
    found = check_estimator("gae", token_level, mask, names, random(3, *mask.shape), gamma=gamma, lambd=lambd)
    assert found[1].abs().sum() > 0


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("side", ["left", "right"])
def test_reinforce_plus_plus_is_skyrls(gamma, side):
    """With rewards of tokens, and padding on either side."""
    token_level, mask, names = rewards(6)
    token_level = token_level + 0.3 * random(5, *mask.shape) * mask
    if side == "right":
        token_level, mask = token_level.flip(1), mask.flip(1)
    check_estimator("reinforce++", token_level, mask, names, gamma=gamma)


def test_the_mean_of_gae_without_a_critics_gradient():
    token_level, mask, names = rewards(6)
    values = random(3, *mask.shape).requires_grad_()
    with rlkernel.patch_skyrl():
        assert not any(x.requires_grad for x in estimate("gae", token_level, mask, names, values=values))


def test_single_responses_are_told_of(monkeypatch):
    import loguru

    told = []
    monkeypatch.setattr(loguru.logger, "warning", told.append)
    estimate("rloo", *rewards(4))
    with rlkernel.patch_skyrl():
        estimate("rloo", *rewards(4))
    assert len(told) == 2 and told[0] == told[1] and "uid-3" in told[0]


def changed(**change):
    token_level, mask, names = rewards(7)
    given = {"token_level": token_level, "mask": mask, "names": names, "values": random(3, *mask.shape)}
    for name, value in change.items():
        given[name] = value(given[name]) if callable(value) else value
    return given


def with_nan(x):
    x[0, 0] = math.nan
    return x


def with_a_hole(x):
    x[0] = torch.tensor([1, 0, 1, 1, 0, 0, 0])
    return x


def only(count):
    return lambda x: (torch.arange(x.numel()) < count).view(x.shape).float()


LEFT = [
    ("grpo", "a reward is not finite", {"token_level": with_nan}),
    ("grpo", "index does not name a group for each response", {"names": ["a"] * 20}),
    ("maxrl", "epsilon is no number >= 0", {"epsilon": None}),
    ("rloo", "token_level_rewards is torch.int64", {"token_level": lambda x: x.long()}),
    ("gae", "values is no tensor", {"values": None}),
    ("gae", "values has not token_level_rewards's shape", {"values": lambda x: x[:, :1]}),
    ("gae", "gamma and lambd are no numbers in [0, 1]", {"lambd": 1.5}),
    ("gae", "fewer than two tokens are to be whitened", {"mask": only(1)}),
    ("gae", "fewer than two tokens are to be whitened", {"mask": only(0)}),
    ("gae", "response_mask holds other numbers than 0 and 1", {"mask": lambda x: x / 2}),
    ("gae", "advantage_batch_normalize", {"config": algorithm(advantage_batch_normalize=True)}),
    ("reinforce++", "response_mask has holes", {"mask": with_a_hole}),
    ("reinforce++", "gamma is no number in [0, 1]", {"gamma": -1}),
]


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize(("name", "reason", "change"), LEFT)
def test_estimates_that_are_left_to_skyrl(name, reason, change):
    def run():
        given = changed(**change)
        return estimate(name, given.pop("token_level"), given.pop("mask"), given.pop("names"), **given)

    check_left_to_skyrl(run, reason)


# the KL


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_the_kl_of_rewards_is_skyrls(estimator, masked):
    new = -random(0, 4, 9).abs()
    base = new + torch.tensor([1e-5, 1e-3, 0.3, 30.0])[:, None] * random(1, 4, 9)
    mask = (random(2, 4, 9) > 0).long() if masked else None

    def run(dtype):
        return ppo_utils.compute_approx_kl(new.to(dtype), base.to(dtype), mask, estimator)

    truth, stock = run(torch.float64), run(torch.float32)
    with rlkernel.patch_skyrl() as patch:
        got = run(torch.float32)
        assert patch.calls == {"compute_approx_kl": 1}
    check(estimator, got, stock, truth)
    if masked:
        assert not got[mask == 0].any()


def test_a_small_k3_has_its_digits():
    """Of which SkyRL's own has none, and may be below 0."""
    new = torch.full((1, 4), -1.0)
    base = new + torch.tensor([1e-4, 1e-5, -1e-5, 3e-5])
    exact = ppo_utils.compute_approx_kl(new.double(), base.double())
    lost = (ppo_utils.compute_approx_kl(new, base) - exact).abs()
    with rlkernel.patch_skyrl():
        got = ppo_utils.compute_approx_kl(new, base)
    assert ((got - exact).abs() < lost / 100).all() and (got > 0).all()


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("the estimator is not known", {"kl_estimator_type": "k4"}),
        ("log_probs_base has not log_probs's shape", {"log_probs_base": torch.zeros(4, 1)}),
        ("loss_mask holds other numbers than 0 and 1", {"loss_mask": torch.full((4, 9), 0.5)}),
        ("the KL has a gradient", {"log_probs": torch.zeros(4, 9, requires_grad=True)}),
    ],
)
def test_a_kl_that_is_left_to_skyrl(reason, options):
    given = {"log_probs": random(0, 4, 9), "log_probs_base": random(1, 4, 9)} | options
    check_left_to_skyrl(lambda: ppo_utils.compute_approx_kl(**given), reason)
