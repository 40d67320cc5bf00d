"""verl's advantage estimators: generalised advantages, and those of whole responses by their group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel.integrations._replacing import (
    Arguments,
    Table,
    differing,
    finite,
    fraction,
    group_numbers,
    replacement,
    require_same,
    unfit_rewards,
    unsuitable,
)
from rlkernel.integrations.verl import contract
from rlkernel.integrations.verl.verl_patch import VerlPatch
from rlkernel.ops.gae import gae
from rlkernel.ops.group_advantages import group_advantages
from rlkernel.ops.whiten import whiten

REGISTRY = "ADV_ESTIMATOR_REGISTRY"
Pair = tuple[Tensor, Tensor]


def plan(patch: VerlPatch) -> None:
    """Add what is replaced to a patch: verl's functions, and their entries in its registry."""
    import verl.trainer.ppo.core_algos as core

    for mode, (function, op, unable, run) in ESTIMATORS.items():
        with patch.planning(function):
            original = contract.checked(core, function)
            new = replacement(patch, original, op, unable, run)
            table = vars(core)[REGISTRY]
            require_same(table, mode, original)
            patch.replace(Table(f"{core.__name__}.{REGISTRY}", table), mode, new, expected=original)
            patch.replace_everywhere("verl", function, new, expected=original)


# groups


def _scores(given: Arguments) -> Tensor:
    """One reward for each response."""
    return given["token_level_rewards"].sum(-1)


def _unable_group(given: Arguments) -> str | None:
    if reason := unfit_rewards(given):
        return reason
    if not finite(given["epsilon"]) or not given["epsilon"] >= 0:
        return "epsilon is no number >= 0"
    index = given["index"]
    if not isinstance(index, np.ndarray | Tensor | list) or len(index) != len(given["response_mask"]):
        return "index does not name a group for each response"
    return None


def _grouped(given: Arguments, rewards: Tensor | None = None, **options: Any) -> Tensor:
    scores = _scores(given) if rewards is None else rewards
    ids = group_numbers(given["index"], scores.device)
    return group_advantages(scores, group_ids=ids, eps=given["epsilon"], **options)


def _spread(advantages: Tensor, given: Arguments) -> Pair:
    """Of each response, to its tokens: verl's advantages, which are its returns too."""
    mask = given["response_mask"]
    found = torch.where(mask != 0, advantages[:, None] * mask, 0)  # also of a group whose rewards hold NaN
    return found, found


def _lengths(given: Arguments) -> Tensor:
    return given["response_mask"].sum(-1)


def _scaled(given: Arguments) -> str:
    return "group" if given["norm_adv_by_std_in_grpo"] else "none"


def _grpo(given: Arguments) -> Pair:
    return _spread(_grouped(given, scale_rewards=_scaled(given), singletons="reward"), given)


def _rloo(singletons: str) -> Callable[[Arguments], Pair]:
    def run(given: Arguments) -> Pair:
        return _spread(_grouped(given, estimator="rloo", singletons=singletons), given)

    return run


def _weighed(estimator: str) -> Callable[[Arguments], Pair]:
    """Responses count by their tokens."""

    def run(given: Arguments) -> Pair:
        found = _grouped(given, estimator=estimator, lengths=_lengths(given), singletons="reward")
        return _spread(found, given)

    return run


def _unable_passk(given: Arguments) -> str | None:
    if given["config"] is None:
        return "there is no config"
    if reason := _unable_group(given):
        return reason
    sizes = group_numbers(given["index"], torch.device("cpu")).bincount()
    return "a group has one response" if sizes.min() < 2 else None  # which verl refuses


def _passk(given: Arguments) -> Pair:
    scale = "group" if given["config"].get("norm_adv_by_std_in_grpo", True) else "none"
    return _spread(_grouped(given, estimator="grpo_passk", scale_rewards=scale), given)


def _unable_gpg(given: Arguments) -> str | None:
    number = finite(given["f_norm"]) and given["f_norm"] != 0
    return _unable_group(given) or (None if number else "f_norm is no number")


def _gpg(given: Arguments) -> Pair:
    scores = _scores(given)
    factor = len(scores) / scores.count_nonzero().clamp(min=1) / given["f_norm"]
    found = _grouped(given, scores, estimator="dr_grpo", singletons="reward")
    return _spread(found * factor, given)


def _gdpo_keys(given: Arguments) -> list[str] | None:
    """The rewards of which each is scaled by itself; None where there is one reward."""
    if any(given[name] is None for name in ("config", "non_tensor_batch", "batch")):
        return None
    return list(given["config"].get("gdpo_reward_keys", None) or [])


def _unable_gdpo(given: Arguments) -> str | None:
    if reason := _unable_group(given):
        return reason
    keys = _gdpo_keys(given)
    if keys is None:
        return None
    if not keys or not all(key in given["non_tensor_batch"] for key in keys):  # of which verl tells
        return "gdpo_reward_keys are not all in the batch"
    weights = given["config"].get("gdpo_reward_weights", None)
    if weights is not None and len(weights) != len(keys):
        return "gdpo_reward_weights are not as many as gdpo_reward_keys"
    return None


def _gdpo(given: Arguments) -> Pair:
    keys, scores = _gdpo_keys(given), _scores(given)[:, None]
    weights = torch.ones(1, dtype=torch.float32, device=scores.device)
    if keys is not None:
        columns = [np.asarray(given["non_tensor_batch"][key], dtype=np.float32) for key in keys]
        scores = torch.tensor(np.stack(columns, -1), device=scores.device)
        of_keys = given["config"].get("gdpo_reward_weights", None)
        listed = [1.0] * len(keys) if of_keys is None else [float(w) for w in of_keys]
        weights = torch.tensor(listed, dtype=torch.float32, device=scores.device)
    found = _grouped(
        given, scores, estimator="gdpo", reward_weights=weights, lengths=_lengths(given),
        scale_rewards=_scaled(given), singletons="reward",
    )  # fmt: skip
    return _spread(found, given)


# tokens


def _unable_gae(given: Arguments) -> str | None:
    if reason := unfit_rewards(given) or unsuitable(values=given["values"]):
        return reason
    if reason := differing(token_level_rewards=given["token_level_rewards"], values=given["values"]):
        return reason
    if not (fraction(given["gamma"]) and fraction(given["lam"])):
        return "gamma and lam are no numbers in [0, 1]"
    return None


def _gae(given: Arguments) -> Pair:
    rewards, values = given["token_level_rewards"], given["values"].detach()
    found = gae(rewards, values, given["response_mask"], gamma=given["gamma"], lam=given["lam"], whiten=True)
    return found.advantages, found.returns


def _to_go(given: Arguments, gamma: float) -> Tensor:
    """The discounted rewards to go."""
    rewards = given["token_level_rewards"]
    return gae(rewards, torch.zeros_like(rewards), given["response_mask"], gamma=gamma, lam=1.0).returns


def _unable_reinforce(given: Arguments) -> str | None:
    if reason := unfit_rewards(given):
        return reason
    return None if fraction(getattr(given["config"], "gamma", None)) else "gamma is no number in [0, 1]"


def _reinforce_plus_plus(given: Arguments) -> Pair:
    returns = _to_go(given, given["config"].gamma)
    return whiten(returns, given["response_mask"]), returns


def _unable_remax(given: Arguments) -> str | None:
    baselines = given["reward_baselines"]
    if reason := unfit_rewards(given) or unsuitable(reward_baselines=baselines):
        return reason
    fits = baselines.shape == given["response_mask"].shape[:1] and not baselines.requires_grad
    return None if fits else "reward_baselines are not one constant for each response"


def _remax(given: Arguments) -> Pair:
    returns = _to_go(given, 1.0)
    return returns - given["reward_baselines"][:, None] * given["response_mask"], returns


Run = Callable[[Arguments], Pair]
Unable = Callable[[Arguments], str | None]
ESTIMATORS: dict[str, tuple[str, str, Unable, Run]] = {
    "gae": ("compute_gae_advantage_return", "gae", _unable_gae, _gae),
    "grpo": ("compute_grpo_outcome_advantage", "group_advantages", _unable_group, _grpo),
    "grpo_vectorized": (
        "compute_grpo_vectorized_outcome_advantage", "group_advantages", _unable_group, _grpo,
    ),
    "gdpo": ("compute_gdpo_outcome_advantage", "group_advantages", _unable_gdpo, _gdpo),
    "grpo_passk": ("compute_grpo_passk_outcome_advantage", "group_advantages", _unable_passk, _passk),
    "reinforce_plus_plus_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage", "group_advantages", _unable_group,
        _weighed("reinforce_plus_plus_baseline"),
    ),
    "rloo": ("compute_rloo_outcome_advantage", "group_advantages", _unable_group, _rloo("reward")),
    "rloo_vectorized": (
        "compute_rloo_vectorized_outcome_advantage", "group_advantages", _unable_group, _rloo("zero"),
    ),
    "opo": ("compute_opo_outcome_advantage", "group_advantages", _unable_group, _weighed("opo")),
    "reinforce_plus_plus": (
        "compute_reinforce_plus_plus_outcome_advantage", "gae", _unable_reinforce, _reinforce_plus_plus,
    ),
    "remax": ("compute_remax_outcome_advantage", "gae", _unable_remax, _remax),
    "gpg": ("compute_gpg_outcome_advantage", "group_advantages", _unable_gpg, _gpg),
}  # fmt: skip
