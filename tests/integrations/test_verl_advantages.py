"""What stands in the place of verl's advantage estimators, beside verl's own."""

import types

import numpy as np
import pytest
import torch
from accuracy import check
from bitwise import assert_equal
from doors import random
from verl_cases import (
    check_left_to_verl,
    core,
    nothing_left_behind,
    rewards,
    upstream,
)

import rlkernel

torch_functional = pytest.importorskip("verl.utils.torch_functional")

assert nothing_left_behind and upstream  # fixtures of every test here


CONFIG = types.SimpleNamespace(gamma=0.97, get=lambda name, default=None: default)
UNSCALED = types.SimpleNamespace(get=lambda name, default=None: False)
ESTIMATORS = {
    "grpo": {},
    "grpo_vectorized": {},
    "gdpo": {},
    "grpo_passk": {"config": CONFIG},
    "reinforce_plus_plus_baseline": {},
    "rloo": {},
    "rloo_vectorized": {},
    "opo": {},
    "reinforce_plus_plus": {"config": CONFIG},
    "remax": {"reward_baselines": random(5, 12)},
    "gpg": {"f_norm": 1.5},
    "gae": {"values": random(6, 12, 7), "gamma": 0.97, "lam": 0.9},
}
UNGROUPED = ("gae", "reinforce_plus_plus", "remax")


def check_advantages(estimator, options, seed=0, dense=False):
    token_level, mask, names = rewards(seed)
    if dense:
        token_level = token_level + random(9, *token_level.shape)
    if estimator == "grpo_passk":
        names[8] = names[0]  # verl refuses groups of one
    function = core.get_adv_estimator_fn(estimator)

    def run(dtype):
        given = {"token_level_rewards": token_level.to(dtype), "response_mask": mask.to(dtype)}
        given |= {} if estimator in UNGROUPED else {"index": names}
        cast = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        found = core.get_adv_estimator_fn(estimator)(**given, **cast)
        assert torch.equal(given["token_level_rewards"], token_level.to(dtype))
        return found

    truth, stock = run(torch.float64), run(torch.float32)
    with rlkernel.patch_verl() as patch:
        got = run(torch.float32)
        assert patch.calls == {function.__name__: 1} and not patch.fallbacks
    for name, *of in zip(("advantages", "returns"), got, stock, truth, strict=True):
        # under the mask verl has what nobody reads
        check(f"{estimator}'s {name}", *(x[mask.bool()] for x in of))
        assert of[0].dtype == torch.float32 and not of[0][~mask.bool()].any()
    return got


@pytest.mark.parametrize("dense", [False, True], ids=["outcome", "every token"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_verls(estimator, dense):
    check_advantages(estimator, ESTIMATORS[estimator], dense=dense)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "gdpo"])
def test_advantages_that_are_not_scaled(estimator):
    scaled = check_advantages(estimator, {"norm_adv_by_std_in_grpo": True})
    plain = check_advantages(estimator, {"norm_adv_by_std_in_grpo": False})
    assert not torch.equal(scaled[0], plain[0])


def test_passk_that_is_not_scaled():
    check_advantages("grpo_passk", {"config": UNSCALED})


@pytest.mark.parametrize("reward_weights", [None, [1.0, 0.25]])
def test_gdpo_of_several_rewards(reward_weights):
    token_level, mask, names = rewards()
    settings = {"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": reward_weights}
    given = {
        "token_level_rewards": token_level, "response_mask": mask, "index": names, "config": settings,
        "non_tensor_batch": {"format": np.arange(12) % 3, "accuracy": random(1, 12).numpy()},
        "batch": {
            "prompts": torch.zeros(12, 4), "attention_mask": torch.cat([torch.ones(12, 4), mask], 1).long(),
        },
    }  # fmt: skip
    want = core.compute_gdpo_outcome_advantage(**given)[0]
    with rlkernel.patch_verl() as patch:
        got = core.compute_gdpo_outcome_advantage(**given)[0]
        assert patch.calls == {"compute_gdpo_outcome_advantage": 1}
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        with (
            pytest.warns(UserWarning, match="gdpo_reward_keys are not all in the batch"),
            pytest.raises(AssertionError, match="not found in non_tensor_batch"),
        ):
            core.compute_gdpo_outcome_advantage(**given | {"non_tensor_batch": {}})


@pytest.mark.parametrize("kind", ["numbers", "tensor", "list"])
def test_names_of_groups(kind):
    token_level, mask, names = rewards()
    numbers = np.array([int(name.removeprefix("uid-")) for name in names])
    index = {"numbers": numbers, "tensor": torch.from_numpy(numbers), "list": numbers.tolist()}[kind]
    want = core.compute_grpo_outcome_advantage(token_level, mask, names)[0]
    with rlkernel.patch_verl():
        got = core.compute_grpo_outcome_advantage(token_level, mask, index)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_equal_rewards_have_no_advantage():
    """verl divides what its mean has lost by its epsilon."""
    token_level, mask, names = torch.full((12, 1), 0.1), torch.ones(12, 1), np.array(["a"] * 12)
    with rlkernel.patch_verl():
        assert not core.compute_grpo_outcome_advantage(token_level, mask, names)[0].any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_a_token_has_no_advantage(estimator):
    """The baseline of ``opo`` is a mean over a group's tokens."""
    token_level, mask, names = rewards()
    names[8] = names[0]  # whose reward nobody would be second to
    mask[names == names[0]] = 0
    given = {"token_level_rewards": token_level, "response_mask": mask}
    given |= {} if estimator in UNGROUPED else {"index": names}
    with rlkernel.patch_verl() as patch:
        found = core.get_adv_estimator_fn(estimator)(**given, **ESTIMATORS[estimator])
        assert len(patch.calls) == 1 and not patch.fallbacks
    for name, got in zip(("advantages", "returns"), found, strict=True):
        assert_equal(f"{estimator}'s {name}", got[mask == 0], torch.zeros(int((mask == 0).sum())))


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
@pytest.mark.parametrize(
    ("function", "change", "reason"),
    [
        ("compute_grpo_outcome_advantage", {"epsilon": torch.tensor(1e-6)}, "epsilon is no number"),
        ("compute_grpo_outcome_advantage", {"index": np.arange(3)}, "index does not name a group for each"),
        (
            "compute_grpo_outcome_advantage",
            {"token_level_rewards": torch.zeros(12, 7, dtype=torch.int64)},
            "token_level_rewards is torch.int64",
        ),
        ("compute_grpo_passk_outcome_advantage", {"config": CONFIG}, "a group has one response"),
        ("compute_grpo_passk_outcome_advantage", {}, "there is no config"),
        ("compute_gpg_outcome_advantage", {"f_norm": torch.tensor(2.0)}, "f_norm is no number"),
        (
            "compute_remax_outcome_advantage",
            {"reward_baselines": torch.zeros(1)},
            "reward_baselines are not one",
        ),
        ("compute_reinforce_plus_plus_outcome_advantage", {}, "gamma is no number in"),
        ("compute_gae_advantage_return", {"gamma": 1.5}, "gamma and lam are no numbers in"),
        (
            "compute_gae_advantage_return",
            {"values": torch.zeros(12, 1)},
            "values has not token_level_rewards's",
        ),
    ],
)
def test_advantages_that_are_left_to_verl(function, change, reason):
    token_level, mask, names = rewards()
    given = {"token_level_rewards": token_level, "response_mask": mask, "index": names}
    if function.split("_")[1] == "gae":
        given = {k: v for k, v in given.items() if k != "index"}
        given |= {"values": random(6, 12, 7), "gamma": 0.9, "lam": 0.9}
    given |= change

    check_left_to_verl(lambda: getattr(core, function)(**given), reason)
