"""SkyRL's advantage estimators, and its KL to the reference where that is part of the rewards."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel.calls.kl_shaped_rewards import KL_ESTIMATORS
from rlkernel.integrations._replacing import (
    Arguments,
    differing,
    finite,
    fraction,
    group_numbers,
    misplaced,
    unfit_rewards,
    unsuitable,
)
from rlkernel.integrations.skyrl import contract
from rlkernel.integrations.skyrl.policy_losses import WEIGHTS, weights
from rlkernel.integrations.skyrl.replacing import Left, Place, Replaced, replace_entry
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch
from rlkernel.ops.gae import gae
from rlkernel.ops.group_advantages import group_advantages
from rlkernel.ops.kl_shaped_rewards import kl_shaped_rewards
from rlkernel.ops.whiten import whiten

REGISTRY = "AdvantageEstimatorRegistry"
KL = "compute_approx_kl"
OF_LOSS = "the KL has a gradient"  # with use_kl_loss; no op of rlkernel's has a KL for each token with one
Pair = tuple[Tensor, Tensor]


def plan(patch: SkyrlPatch) -> None:
    """Add what is replaced to a patch: SkyRL's functions, and their entries in its registry."""
    home = importlib.import_module(contract.HOMES["advantages"])

    for name, kind in ESTIMATORS.items():
        with patch.planning(kind[0]):
            original = contract.checked(home, kind[0])
            make = functools.partial(_replaced, patch, kind)
            new = make(original, Place(home.__name__, kind[0]))
            patch.replace_everywhere("skyrl", kind[0], new, expected=original)
            replace_entry(patch, Place(home.__name__, name, REGISTRY), original, make)
    with patch.planning(KL):
        original = contract.checked(home, KL)
        place = Place(home.__name__, KL)
        new = Replaced(patch, original, "kl_shaped_rewards", _unable_kl, _kl, place, quiet=OF_LOSS)
        patch.replace_everywhere("skyrl", KL, new, expected=original)


def _replaced(patch: SkyrlPatch, kind: Kind, original: Callable[..., Any], place: Place) -> Replaced:
    _, op, unable, run = kind
    return Replaced(patch, original, op, unable, run, place)


# groups


def _unable_rows(given: Arguments) -> str | None:
    if reason := unfit_rewards(given):
        return reason
    return None if torch.isfinite(given["token_level_rewards"]).all() else "a reward is not finite"


def _unable_group(given: Arguments) -> str | None:
    if reason := _unable_rows(given):
        return reason
    epsilon = given.get("epsilon", 0.0)
    if not finite(epsilon) or not epsilon >= 0:
        return "epsilon is no number >= 0"
    index = given["index"]
    if not isinstance(index, np.ndarray | Tensor | list | tuple) or len(index) != len(given["response_mask"]):
        return "index does not name a group for each response"
    return None


def _grouped(given: Arguments, **options: Any) -> Pair:
    """Of each response, to its tokens: SkyRL's advantages, which are its returns too."""
    scores = given["token_level_rewards"].sum(-1)
    ids = group_numbers(given["index"], scores.device)
    advantages = group_advantages(scores, group_ids=ids, eps=given.get("epsilon", 0.0), **options)
    found = advantages[:, None] * given["response_mask"]
    return found, found


def _grpo(given: Arguments) -> Pair:
    scale = "group" if given["grpo_norm_by_std"] else "none"
    return _grouped(given, scale_rewards=scale, singletons="reward")


def _maxrl(given: Arguments) -> Pair:
    return _grouped(given, estimator="maxrl", singletons="reward")


def _rloo(given: Arguments) -> Pair:
    from loguru import logger  # SkyRL's

    for name, count in Counter(list(given["index"])).items():
        if count == 1:
            logger.warning(f"Only one response for prompt index {name}, setting advantage to 0")
    return _grouped(given, estimator="rloo", singletons="zero")


# tokens


def _unable_whitened(given: Arguments) -> str | None:
    """SkyRL refuses fewer than two tokens."""
    mask = given["response_mask"]
    if weights(mask):
        return WEIGHTS.replace("loss_mask", "response_mask")
    return None if mask.sum() > 1 else "fewer than two tokens are to be whitened"


def _unable_gae(given: Arguments) -> str | None:
    rewards, values = given["token_level_rewards"], given["values"]
    if reason := _unable_rows(given) or unsuitable(values=values):
        return reason
    if reason := differing(token_level_rewards=rewards, values=values):
        return reason
    if not (fraction(given["gamma"]) and fraction(given["lambd"])):
        return "gamma and lambd are no numbers in [0, 1]"
    if getattr(given["kwargs"].get("config"), "advantage_batch_normalize", False):
        return "advantage_batch_normalize reads what is whitened under the mask"
    return _unable_whitened(given)


def _gae(given: Arguments) -> Pair:
    # SkyRL walks over all tokens, also over those under the mask
    rewards, values = given["token_level_rewards"], given["values"].detach()
    found = gae(rewards, values, gamma=given["gamma"], lam=given["lambd"])
    return whiten(found.advantages, given["response_mask"]), found.returns


def _unable_reinforce(given: Arguments) -> str | None:
    if reason := _unable_rows(given) or _unable_whitened(given):
        return reason
    if not fraction(given["gamma"]):
        return "gamma is no number in [0, 1]"
    there = given["response_mask"] != 0
    begins = there[:, 1:] & ~there[:, :-1]
    return "response_mask has holes" if (begins.sum(-1) + there[:, 0] > 1).any() else None


def _reinforce(given: Arguments) -> Pair:
    rewards, mask = given["token_level_rewards"], given["response_mask"]
    returns = gae(rewards, torch.zeros_like(rewards), mask, gamma=given["gamma"], lam=1.0).returns
    return whiten(returns, mask), returns


# the penalty of rewards


def _unable_kl(given: Arguments) -> str | None:
    tensors = {name: given[name] for name in ("log_probs", "log_probs_base")}
    if reason := unsuitable(**tensors):
        return reason
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values()):
        return OF_LOSS
    mask = given["loss_mask"]
    if mask is not None:
        if reason := misplaced(loss_mask=mask):
            return reason
        tensors["loss_mask"] = mask
    if reason := differing(**tensors):
        return reason
    return None if given["kl_estimator_type"] in KL_ESTIMATORS else "the estimator is not known"


def _kl(given: Arguments) -> Tensor:
    new, mask, estimator = given["log_probs"].detach(), given["loss_mask"], given["kl_estimator_type"]
    if mask is not None and weights(mask):
        raise Left(WEIGHTS)
    bounds: Arguments = {"kl_input_clamp": 20.0, "kl_output_clamp": 10.0} if estimator == "k3" else {}
    nothing = torch.zeros_like(new)
    base = given["log_probs_base"].detach()
    return -kl_shaped_rewards(nothing, new, base, mask, beta=1.0, kl_estimator=estimator, **bounds)


Run = Callable[[Arguments], Pair]
Unable = Callable[[Arguments], str | None]
Kind = tuple[str, str, Unable, Run]
ESTIMATORS: dict[str, Kind] = {
    "grpo": ("compute_grpo_outcome_advantage", "group_advantages", _unable_group, _grpo),
    "rloo": ("compute_rloo_outcome_advantage", "group_advantages", _unable_group, _rloo),
    "maxrl": ("compute_maxrl_advantage", "group_advantages", _unable_group, _maxrl),
    "gae": ("compute_gae_advantage_return", "gae", _unable_gae, _gae),
    "reinforce++": (
        "compute_reinforce_plus_plus_outcome_advantage", "gae", _unable_reinforce, _reinforce,
    ),
}  # fmt: skip
