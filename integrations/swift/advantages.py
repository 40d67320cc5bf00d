"""SWIFT's advantages of groups, from the rewards of several functions."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import WIDE, Arguments, finite, replacement, unsuitable
from rlkernel.integrations.swift import contract
from rlkernel.integrations.swift.swift_patch import SwiftPatch
from rlkernel.ops.group_advantages import group_advantages

NAME = "compute_advantages"
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus")
SCALES = ("group", "batch", "none", "gdpo")
EPS, GDPO_EPS = 1e-4, 1e-8  # SWIFT's own


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    home = importlib.import_module(contract.HOMES["advantages"])
    with patch.planning(NAME):
        original = contract.checked(home, NAME)
        new = replacement(patch, original, "group_advantages", _unable, _advantages)
        patch.replace_everywhere("swift", NAME, new, expected=original)


def _unable(given: Arguments) -> str | None:
    rewards, weights, size = given["rewards_per_func"], given["reward_weights"], given["num_generations"]
    if reason := unsuitable(WIDE, rewards_per_func=rewards, reward_weights=weights):
        return reason
    if rewards.dim() != 2 or not rewards.numel() or weights.shape != rewards.shape[1:]:
        return "rewards_per_func is not [N, K] with a weight for each function"
    if not isinstance(size, int) or size < 1 or len(rewards) % size:
        return "num_generations does not divide the rewards"
    if given["advantage_estimator"] not in ESTIMATORS or given["scale_rewards"] not in SCALES:
        return "advantage_estimator or scale_rewards is unknown"
    if _adds_kl(given) and (
        reason := unsuitable(WIDE, kl_values=given["kl_values"]) or _unfit_kl(given, len(rewards))
    ):
        return reason
    if not torch.isfinite(_rewards(given)).all():
        return "a reward is not finite"
    if _is_gdpo(given) and not torch.isfinite(rewards).all():
        return "gdpo of a function without a reward"
    return None


def _unfit_kl(given: Arguments, rows: int) -> str | None:
    if given["kl_values"].shape != (rows,) or not finite(given["beta"]):
        return "kl_values are not one for each reward, with a beta"
    return None


def _adds_kl(given: Arguments) -> bool:
    return bool(given["kl_in_reward"] and given["beta"] != 0.0 and given["kl_values"] is not None)


def _is_gdpo(given: Arguments) -> bool:
    return given["scale_rewards"] == "gdpo" and given["advantage_estimator"] != "reinforce_plus_plus"


def _rewards(given: Arguments) -> Tensor:
    rewards: Tensor = (given["rewards_per_func"] * given["reward_weights"]).nansum(dim=1)
    return rewards - given["beta"] * given["kl_values"] if _adds_kl(given) else rewards


def _advantages(given: Arguments) -> tuple[Tensor, Tensor]:
    size, kind = given["num_generations"], given["advantage_estimator"]
    scale: Any = given["scale_rewards"]
    rewards = _rewards(given)
    options: dict[str, Any] = {"group_size": size, "eps": EPS}
    if _is_gdpo(given):  # of each function's rewards, without the KL
        options = {"group_size": size, "eps": GDPO_EPS, "batch_eps": GDPO_EPS, "batch_eps_in": "std"}
        weights, each = given["reward_weights"], given["rewards_per_func"]
        found = group_advantages(each, estimator="gdpo", reward_weights=weights, **options)
    elif kind == "reinforce_plus_plus" and scale == "batch":
        options |= {"batch_eps": EPS, "batch_eps_in": "std"}
        found = group_advantages(rewards, estimator="reinforce_plus_plus_baseline", **options)
    else:
        scale = "none" if scale == "gdpo" else scale
        found = group_advantages(rewards, estimator="grpo", scale_rewards=scale, **options)
        if kind == "rloo" and size > 1:
            found = found * (size / (size - 1))
    return found.to(rewards.dtype), rewards
