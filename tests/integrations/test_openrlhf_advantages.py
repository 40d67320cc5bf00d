"""What stands in the place of OpenRLHF's rewards and advantages, beside OpenRLHF's own."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from accuracy import check
from doors import random
from openrlhf_cases import (
    MODULES,
    check_left_to_openrlhf,
    makers,
    nothing_left_behind,
    upstream,
    utils,
)

import rlkernel
from rlkernel.integrations.openrlhf.advantages import BASELINES, SHAPED

assert nothing_left_behind and upstream  # fixtures of every test here

Experience = MODULES["trainer.ppo_utils.experience"].Experience
ESTIMATORS = ("gae", "reinforce", *BASELINES)
PENALTIES = {"overlong_buffer_len": 4, "overlong_penalty_factor": 1.0, "stop_properly_penalty_coef": 0.5}


def maker(estimator="gae", n=4, kl_coef=0.1, clip=None, gamma=1.0, lambd=0.95, **more):
    """An experience maker without its remote models."""
    made = object.__new__(makers.RemoteExperienceMaker)
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lambd, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=n, max_new_tokens=9),
        reward=SimpleNamespace(clip_range=clip, **more),
        data=SimpleNamespace(max_len=9),
    )
    made.strategy, made.advantage_estimator = SimpleNamespace(args=args), estimator
    made.kl_ctl = SimpleNamespace(value=kl_coef)
    return made


def tokens(seed=0, rows=5, length=9):
    """A mask with holes, one row of it empty, and numbers that no mask has touched."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=g)
    lengths[0] = length
    mask = torch.arange(length) < lengths[:, None]
    mask[0, 2:4] = False
    return mask, *(torch.randn(rows, length, generator=g) for _ in range(2))


# walks back over a response


@pytest.mark.parametrize("gamma, lambd", [(1.0, 0.95), (0.9, 1.0), (0.97, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("masked", [True, False])
def test_generalised_advantages_are_openrlhfs(gamma, lambd, masked):
    mask, rewards, values = tokens(1)
    given = mask if masked else None

    def call(dtype):
        return maker().get_advantages_and_returns(values.to(dtype), rewards.to(dtype), given, gamma, lambd)

    truth, stock = call(torch.float64), call(torch.float32)
    with rlkernel.patch_openrlhf() as patch:
        got = call(torch.float32)
        assert patch.calls == {"RemoteExperienceMaker.get_advantages_and_returns": 1} and not patch.fallbacks
    for name, found, theirs, want in zip(("advantages", "returns"), got, stock, truth, strict=True):
        where = mask if masked else torch.ones_like(mask)
        assert not found[~where].any()
        check(name, found[where], theirs[where], want[where])


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_returns_are_openrlhfs(gamma, dtype):
    mask, rewards, _ = tokens(2)
    rewards = rewards.to(dtype)

    def call(x):
        return maker("reinforce").get_cumulative_returns(x, mask, gamma)

    truth, stock = call(rewards.double()), call(rewards)
    with rlkernel.patch_openrlhf() as patch:
        got = call(rewards)
        assert patch.calls == {"RemoteExperienceMaker.get_cumulative_returns": 1} and not patch.fallbacks
    assert got.dtype == dtype and not got[~mask].any()
    check("returns", got[mask], stock[mask], truth[mask])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rewards": torch.zeros(5, 9).long()}, "rewards is torch.int64"),
        ({"action_mask": torch.ones(5, 1)}, "action_mask has not rewards's shape"),
        ({"gamma": 1.5}, "gamma is no number in [0, 1]"),
        ({"lambd": torch.tensor(0.5)}, "lambd is no number in [0, 1]"),
        ({"values": torch.zeros(5, 9).long()}, "values is torch.int64"),
    ],
)
def test_advantages_that_are_left_to_openrlhf(changes, reason):
    mask, rewards, values = tokens(3)
    given = {"values": values, "rewards": rewards, "action_mask": mask, "gamma": 0.9, "lambd": 0.9} | changes
    check_left_to_openrlhf(lambda: maker().get_advantages_and_returns(**given), reason)


# rewards


@pytest.mark.parametrize("coef", [0.1, 0.0, -1.0])
@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
def test_rewards_of_tokens_are_openrlhfs(coef, bounds):
    mask, kl, _ = tokens(4)
    mask[1] = False  # whose reward stands at the last place all the same
    kl, r = kl * mask, random(5, 5)

    def call(dtype):
        return utils.compute_reward(r.to(dtype), coef, kl.to(dtype), mask, bounds)

    with rlkernel.patch_openrlhf() as patch:
        assert makers.compute_reward is utils.compute_reward
        got = call(torch.float32)
        assert patch.calls == {"compute_reward": 1} and not patch.fallbacks
    check("reward", got, call(torch.float32), call(torch.float64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": torch.zeros(3)}, "r is not one constant for each response"),
        ({"kl": torch.zeros(5, 9).long()}, "kl is torch.int64"),
        ({"action_mask": None}, "action_mask is no tensor"),
        ({"kl_coef": torch.tensor(0.1)}, "kl_coef is no number"),
    ],
)
def test_rewards_that_are_left_to_openrlhf(changes, reason):
    mask, kl, _ = tokens(6)
    given = {"r": random(7, 5), "kl_coef": 0.1, "kl": kl, "action_mask": mask} | changes
    check_left_to_openrlhf(lambda: utils.compute_reward(**given), reason)


# a whole batch


def experiences(seed=0, prompts=3, n=4, dtype=torch.float32, rewards=None):
    """Of several responses each, in the order in which the batches were balanced."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(prompts * n, generator=g).tolist()
    values = torch.randn(prompts * n, generator=g) if rewards is None else rewards
    found = []
    for start in range(0, prompts * n, 3):
        index = order[start : start + 3]
        rows, length = len(index), 9
        lengths = torch.randint(1, length + 1, (rows,), generator=g)
        mask = torch.arange(length) < lengths[:, None]
        mask[0, 2:4] &= lengths[0] <= 4
        found.append(
            Experience(
                index=index, rewards=values[index].to(dtype), action_mask=mask,
                kl=(torch.randn(rows, length, generator=g) * mask).to(dtype),
                values=torch.randn(rows, length, generator=g).to(dtype),
                response_length=lengths, truncated=lengths == length,
                info={"reward": values[index].to(dtype)},
            )
        )  # fmt: skip
    return found


def batch_of(made, given):
    found = made.compute_advantages_and_returns(copy.deepcopy(given))
    return {
        (i, name): x
        for i, e in enumerate(found)
        for name, x in {
            "advantages": e.advantages,
            "returns": e.returns,
            "rewards": e.rewards,
            **e.info,
        }.items()
    }


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["", "penalties"])
def test_a_batch_is_openrlhfs(estimator, penalties):
    options = {
        "estimator": estimator,
        "gamma": 0.95 if estimator in ("gae", "reinforce") else 1.0,
        "clip": (-1.5, 1.5),
    }
    given = [experiences(8, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    truth, stock = (batch_of(maker(**options, **penalties), x) for x in given)
    with rlkernel.patch_openrlhf() as patch:
        got = batch_of(maker(**options, **penalties), given[1])
        assert patch.calls["compute_reward"] == len(given[1]) and not patch.fallbacks
        assert patch.calls[SHAPED] == (estimator in BASELINES)
    assert got.keys() == stock.keys()
    for (i, name), found in got.items():
        mask = given[1][i].action_mask if name in ("advantages", "returns") else torch.tensor(True)
        assert found.dtype == stock[i, name].dtype
        # what the largest of them loses: the mean and the deviation are of the whole batch
        check(
            f"{name} of {i}", torch.where(mask, found, 0), torch.where(mask, stock[i, name], 0),
            torch.where(mask, truth[i, name], 0), magnitude=4.0,
        )  # fmt: skip


def test_a_group_of_equal_rewards_has_no_advantage():
    """What OpenRLHF's mean of eight times 0.1 loses, it divides by the deviation that this makes, and 1e-9:
    each response of the group is pushed down."""
    made, given = maker("group_norm", n=8, kl_coef=0.0), experiences(9, 2, 8, rewards=torch.full((16,), 0.1))
    stock = batch_of(made, given)
    with rlkernel.patch_openrlhf():
        got = batch_of(made, given)
    assert max(x.abs().max() for (_, name), x in stock.items() if name == "advantages") > 0.8
    assert not any(x.any() for (_, name), x in got.items() if name == "advantages")


@pytest.mark.parametrize(
    ("n", "changed", "reason"),
    [
        (1, None, "responses are not in groups of two or more"),
        (5, None, "responses are not in groups of two or more"),
        (4, math.nan, "rewards are not [B] finite numbers on a CPU"),
        (4, math.inf, "rewards are not [B] finite numbers on a CPU"),
    ],
)
def test_groups_that_are_left_to_openrlhf(n, changed, reason):
    made, given = maker("group_norm", n=n), experiences(10)
    if changed is not None:
        given[0].rewards[0] = changed

    def outcome():
        try:
            found = batch_of(made, given)
        except RuntimeError as error:  # of groups that OpenRLHF cannot make
            return str(error)
        return {name: x.nan_to_num(7.0).tolist() for name, x in found.items() if name[1] == "rewards"}

    want = outcome()
    with rlkernel.patch_openrlhf() as patch:
        assert outcome() == want
        assert reason in str(patch.fallbacks) and SHAPED not in patch.calls


def test_an_error_in_the_middle_leaves_nothing_behind(monkeypatch):
    made, given = maker("rloo"), experiences(11)
    monkeypatch.setattr(makers, "apply_length_penalties", lambda *_: 1 / 0)
    with rlkernel.patch_openrlhf():
        with pytest.raises(ZeroDivisionError):
            made.compute_advantages_and_returns(given)
        got = utils.compute_reward(torch.ones(3), 0.0, given[0].kl, given[0].action_mask)
    assert got.sum() == 3, "and not what the batch would have had"
