"""OpenRLHF's advantages: rewards of tokens, baselines of groups, and the walks back over a response."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import (
    Arguments,
    differing,
    finite,
    fraction,
    misplaced,
    replacement,
    shown,
    unsuitable,
)
from rlkernel.integrations.openrlhf import contract
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch
from rlkernel.ops.gae import gae
from rlkernel.ops.group_advantages import group_advantages
from rlkernel.ops.kl_shaped_rewards import kl_shaped_rewards

REWARD, SHAPED = "compute_reward", "RemoteExperienceMaker.compute_advantages_and_returns"
# what is taken off a response's reward before its tokens get it; None: nothing
BASELINES: dict[str, dict[str, Any]] = {
    "rloo": {"estimator": "rloo"},
    "reinforce_baseline": {"estimator": "dr_grpo"},
    "dr_grpo": {"estimator": "dr_grpo"},
    "group_norm": {"estimator": "grpo", "eps": 1e-9},
    "flash_reinforce": {"estimator": "dr_grpo"},  # of all responses
}


def plan(patch: OpenRlhfPatch) -> None:
    """Add what is replaced to a patch."""
    import openrlhf.models.utils as utils
    import openrlhf.trainer.ppo_utils.experience_maker as home

    maker, shaping = home.RemoteExperienceMaker, Shaping(patch)
    with patch.planning(REWARD):
        original = contract.checked(utils, REWARD)
        new = replacement(patch, original, "kl_shaped_rewards", _unable_reward, _reward)
        shaped = shown(shaping.given_to(new), original, "kl_shaped_rewards")
        patch.replace_everywhere("openrlhf", REWARD, shaped, expected=original)
        with patch.planning(SHAPED):  # whose rewards reach the other one
            method = contract.checked(maker, "compute_advantages_and_returns")
            new = shown(shaping.during(method), method, "group_advantages")
            patch.replace(maker, "compute_advantages_and_returns", new, expected=method)
    for name, unable, run in (
        ("get_advantages_and_returns", _unable_gae, _gae),
        ("get_cumulative_returns", _unable_returns, _returns),
    ):
        with patch.planning(f"{maker.__name__}.{name}"):
            original = contract.checked(maker, name)
            patch.replace(maker, name, replacement(patch, original, "gae", unable, run), expected=original)


# rewards of responses, less their baselines


class Shaping:
    """Rewards of groups, worked out as OpenRLHF's method runs and handed over where it has made its own.

    It makes them in the middle of the method, and calls ``compute_reward`` with those of one experience after
    another.
    """

    def __init__(self, patch: OpenRlhfPatch) -> None:
        self.patch = patch
        self._maker: Any = None
        self._experiences: list[Any] = []
        self._rewards: list[Tensor] | None = None

    def during(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_advantages_and_returns(maker: Any, experiences: list[Any]) -> Any:
            if _estimator(maker) not in BASELINES:
                return original(maker, experiences)
            if reason := _unable_groups(maker, experiences):
                self.patch.left(SHAPED, reason)
                return original(maker, experiences)
            self.patch.count(self.patch.calls, SHAPED)
            with self._of(maker, experiences):
                return original(maker, experiences)

        return compute_advantages_and_returns

    def given_to(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_reward(
            r: Any,
            kl_coef: float,
            kl: Any,
            action_mask: Tensor | None = None,
            reward_clip_range: tuple[float, float] | None = None,
        ) -> Any:
            place = next((i for i, x in enumerate(self._experiences) if x.kl is kl and kl is not None), None)
            if place is not None:
                if self._rewards is None:  # after the penalties of lengths
                    self._rewards = _without_baselines(self._maker, self._experiences)
                r = self._rewards[place].to(r.dtype)
            return compute(r, kl_coef, kl, action_mask, reward_clip_range)

        return compute_reward

    @contextlib.contextmanager
    def _of(self, maker: Any, experiences: list[Any]) -> Iterator[None]:
        self._maker, self._experiences, self._rewards = maker, experiences, None
        try:
            yield
        finally:
            self._maker, self._experiences, self._rewards = None, [], None


def _estimator(maker: Any) -> Any:
    return maker.strategy.args.algo.advantage.estimator


def _unable_groups(maker: Any, experiences: list[Any]) -> str | None:
    size, count = maker.strategy.args.rollout.n_samples_per_prompt, 0
    for experience in experiences:
        rewards, of_tokens = experience.rewards, experience.kl
        if reason := unsuitable(rewards=rewards, kl=of_tokens):
            return reason
        if rewards.dim() != 1 or rewards.device.type != "cpu" or not bool(rewards.isfinite().all()):
            return "rewards are not [B] finite numbers on a CPU"
        count += len(rewards)
    grouped = isinstance(size, int) and size > 1 and count % size == 0
    if not grouped and _estimator(maker) != "flash_reinforce":
        return "responses are not in groups of two or more"
    return None if count else "there is no response"


def _without_baselines(maker: Any, experiences: list[Any]) -> list[Tensor]:
    """[B] of each experience; the groups are in the order of the prompts."""
    places = torch.tensor(
        list(chain.from_iterable(experience.index for experience in experiences)), device="cpu"
    )
    found = torch.cat([experience.rewards for experience in experiences])
    ordered = torch.empty_like(found)
    ordered[places] = found
    kind = _estimator(maker)
    size = len(found) if kind == "flash_reinforce" else maker.strategy.args.rollout.n_samples_per_prompt
    shaped = group_advantages(ordered, group_size=size, **BASELINES[kind])
    return list(shaped[places].split([len(experience.index) for experience in experiences]))


# rewards of tokens


def _unable_reward(given: Arguments) -> str | None:
    r, kl, mask = given["r"], given["kl"], given["action_mask"]
    if reason := unsuitable(kl=kl, r=r) or misplaced(action_mask=mask):
        return reason
    if reason := differing(kl=kl, action_mask=mask):
        return reason
    if r.shape != kl.shape[:1] or r.device != kl.device or r.requires_grad or kl.requires_grad:
        return "r is not one constant for each response"
    return None if finite(given["kl_coef"]) else "kl_coef is no number"


def _reward(given: Arguments) -> Tensor:
    r, kl, bounds = given["r"], given["kl"], given["reward_clip_range"]
    if bounds:
        r = r.clamp(min=bounds[0], max=bounds[1])
    # k1 of a difference that is the estimate itself
    beta, none = max(float(given["kl_coef"]), 0.0), torch.zeros_like(kl)
    found = kl_shaped_rewards(r.to(kl.dtype), kl, none, given["action_mask"], beta=beta)
    # OpenRLHF gives that of a response without a token to its last place, and tells of it as its return
    found[:, -1] += torch.where((given["action_mask"] != 0).any(-1), 0, r)
    return found.to(kl.dtype)


# advantages of tokens


def _unable_returns(given: Arguments) -> str | None:
    rewards, mask = given["rewards"], given["action_mask"]
    if reason := unsuitable(rewards=rewards) or (None if mask is None else misplaced(action_mask=mask)):
        return reason
    if reason := differing(rewards=rewards, **({} if mask is None else {"action_mask": mask})):
        return reason
    return None if fraction(given["gamma"]) else "gamma is no number in [0, 1]"


def _unable_gae(given: Arguments) -> str | None:
    if reason := _unable_returns(given) or unsuitable(values=given["values"]):
        return reason
    if reason := differing(rewards=given["rewards"], values=given["values"].detach()):
        return reason
    return None if fraction(given["lambd"]) else "lambd is no number in [0, 1]"


def _gae(given: Arguments) -> tuple[Tensor, Tensor]:
    found = gae(
        given["rewards"], given["values"].detach(), given["action_mask"], gamma=given["gamma"],
        lam=given["lambd"], holes="zero",
    )  # fmt: skip
    return found.advantages, found.returns


def _returns(given: Arguments) -> Tensor:
    rewards = given["rewards"]
    found = gae(
        rewards, torch.zeros_like(rewards), given["action_mask"], gamma=given["gamma"], lam=1.0, holes="zero"
    )
    return found.returns.to(rewards.dtype)
