"""OpenRLHF's policy loss, value loss and DPO: modules whose forward passes are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.policy_loss import POLICY_METRICS
from rlkernel.integrations._preferences import loss_of_pairs, unfit_beta, unfit_pairs
from rlkernel.integrations._replacing import (
    WIDE,
    Arguments,
    differing,
    finite,
    misplaced,
    replacement,
    unsuitable,
)
from rlkernel.integrations.openrlhf import aggregation, contract, correction
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch
from rlkernel.ops.policy_loss import policy_loss
from rlkernel.ops.value_loss import value_loss

RATIO_BOUND = 20.0  # of the logarithm of PPO's ratio
Losses = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def plan(patch: OpenRlhfPatch) -> None:
    """Add what is replaced to a patch: methods, so that losses that were made before are replaced, too."""
    import openrlhf.models.loss as home

    for name, (op, unable, run) in LOSSES.items():
        with patch.planning(f"{name}.forward"):
            kind = vars(home)[name]
            contract.checked(kind, "__init__")
            original = contract.checked(kind, "forward")
            patch.replace(kind, "forward", replacement(patch, original, op, unable, run), expected=original)


def _number(x: Any, low: float) -> bool:
    return finite(x) and x >= low


# the policy


def _unable_policy(given: Arguments) -> str | None:
    loss, names = given["self"], ["log_probs", "old_log_probs", "advantages"]
    if loss.policy_loss_type not in ("ppo", "gspo"):
        return "policy_loss_type is unknown"
    if loss.is_correction_level != "off":
        names.append("rollout_log_probs")
        if reason := correction.unable(loss):
            return reason
    if not (_number(loss.clip_eps_low, 0) and _number(loss.clip_eps_high, 0)):
        return "clip_eps_low and clip_eps_high are no numbers >= 0"
    if loss.dual_clip is not None and not (_number(loss.dual_clip, 1) and loss.dual_clip > 1):
        return "dual_clip is no number above 1"
    return _unable_tokens(given, names)


def _unable_tokens(given: Arguments, names: list[str]) -> str | None:
    tensors, mask = {name: given[name] for name in names}, given["action_mask"]
    if reason := unsuitable(WIDE, **tensors) or misplaced(action_mask=mask):
        return reason
    return differing(**tensors, action_mask=mask) or aggregation.unable(given)


def _policy(given: Arguments) -> Losses:
    loss, mask, advantages = given["self"], given["action_mask"], given["advantages"]
    new, old, rollout = given["log_probs"], given["old_log_probs"], given["rollout_log_probs"]
    corrected = loss.is_correction_level != "off"
    if loss.policy_loss_type == "gspo" and corrected:  # the ratio is to the rollout
        out = policy_loss(new, rollout, advantages, mask, **_options(given))
        return out.loss, _clipped(out), correction.mean_difference(old, new, mask), None, None
    if corrected:
        return _corrected(given)
    out = policy_loss(new, old, advantages, mask, **_options(given))
    return out.loss, _clipped(out), _metric(out, "approx_kl_k1"), None, None


def _corrected(given: Arguments) -> Losses:
    mask, advantages = given["action_mask"], given["advantages"]
    new, old, rollout = given["log_probs"], given["old_log_probs"], given["rollout_log_probs"]
    options, gate = _options(given), correction.gate(given)
    # a clipped loss is a multiple of the size of its advantage; the metrics are of those as they were
    told = policy_loss(new.detach(), old, advantages, mask, **options)
    weighed = torch.where(mask != 0, advantages * gate.weights, 0)
    out = policy_loss(new, old, weighed, mask, **options)
    drift = correction.mean_difference(rollout, old, mask)
    return out.loss, _clipped(told), _metric(told, "approx_kl_k1"), drift, gate.filtered


def _options(given: Arguments) -> dict[str, Any]:
    """For ``policy_loss``."""
    loss = given["self"]
    if loss.policy_loss_type == "gspo":
        ratio: dict[str, Any] = {"importance_sampling_level": "sequence"}
    else:
        ratio = {"log_ratio_clip": RATIO_BOUND}
    bounds = {"epsilon": loss.clip_eps_low, "epsilon_high": loss.clip_eps_high}
    return ratio | bounds | {"loss_type": "ppo", "clip_ratio_c": loss.dual_clip, **aggregation.options(given)}


def _metric(out: Any, name: str) -> Tensor:
    value: Tensor = out.metrics[POLICY_METRICS.index(name)]
    return value


def _clipped(out: Any) -> Tensor:
    return _metric(out, "clip_fraction_low") + _metric(out, "clip_fraction_high")


# values


def _unable_value(given: Arguments) -> str | None:
    clip = given["self"].clip_eps
    if clip is not None and not _number(clip, 0):
        return "clip_eps is no number >= 0"
    return _unable_tokens(given, ["values", "returns", *([] if clip is None else ["old_values"])])


def _value(given: Arguments) -> Tensor:
    clip = given["self"].clip_eps
    old = {} if clip is None else {"old_values": given["old_values"], "cliprange_value": clip}
    values, returns, mask = given["values"], given["returns"], given["action_mask"]
    return value_loss(values, returns, mask, **old, **aggregation.options(given)).loss


# preferences


SIDES = ("policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps")


def _unable_preference(given: Arguments) -> str | None:
    loss = given["self"]
    if reason := unfit_pairs(*_pairs(given)) or unfit_beta(loss.beta):
        return reason
    if not _number(loss.label_smoothing, 0) or loss.label_smoothing > 1:
        return "label_smoothing is no number in [0, 1]"
    return None


def _pairs(given: Arguments) -> tuple[Arguments, Arguments]:
    logps = {name: given[name] for name in SIDES}
    return {name: logps.pop(name) for name in SIDES[:2]}, logps


def _preference(given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    loss = given["self"]
    smoothing = 0.0 if loss.ipo else loss.label_smoothing
    kind = "ipo_sum" if loss.ipo else "sigmoid"
    out = loss_of_pairs(*_pairs(given), beta=loss.beta, loss_type=kind, label_smoothing=smoothing)
    return out.loss, out.chosen_rewards.detach(), out.rejected_rewards.detach()


Unable = Callable[[Arguments], str | None]
LOSSES: dict[str, tuple[str, Unable, Callable[[Arguments], Any]]] = {
    "PolicyLoss": ("policy_loss", _unable_policy, _policy),
    "ValueLoss": ("value_loss", _unable_value, _value),
    "DPOLoss": ("preference_loss", _unable_preference, _preference),
}
