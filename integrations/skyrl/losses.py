"""SkyRL's policy losses, which are entries of its registry, and its critic's loss."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.value_loss import VALUE_METRICS
from rlkernel.integrations._replacing import Arguments, differing, finite, misplaced, unsuitable
from rlkernel.integrations.skyrl import contract, policy_losses
from rlkernel.integrations.skyrl.policy_losses import LOSSES, Loss
from rlkernel.integrations.skyrl.replacing import Left, Place, Replaced, replace_entry
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch
from rlkernel.ops.value_loss import value_loss

REGISTRY = "PolicyLossRegistry"
CRITIC = "ppo_critic_loss"


def plan(patch: SkyrlPatch) -> None:
    """Add what is replaced to a patch: SkyRL's functions, and their entries in its registry."""
    home = importlib.import_module(contract.HOMES["losses"])
    for loss in LOSSES:
        with patch.planning(loss.function):
            original = contract.checked(home, loss.function)
            new = _replaced(patch, loss, original, Place(home.__name__, loss.function))
            patch.replace_everywhere("skyrl", loss.function, new, expected=original)
            for name in loss.names:
                make = functools.partial(_replaced, patch, loss)
                replace_entry(patch, Place(home.__name__, name, REGISTRY), original, make)
    with patch.planning(CRITIC):
        original = contract.checked(home, CRITIC)
        place = Place(home.__name__, CRITIC)
        new = Replaced(patch, original, "value_loss", _unable_critic, _critic, place)
        patch.replace_everywhere("skyrl", CRITIC, new, expected=original)


def _replaced(patch: SkyrlPatch, loss: Loss, original: Any, place: Place) -> Replaced:
    return Replaced(
        patch, original, "policy_loss", lambda given: policy_losses.unable(loss, given),
        lambda given: policy_losses.run(loss, given), place,
    )  # fmt: skip


# the critic's


def _unable_critic(given: Arguments) -> str | None:
    clip = getattr(given["config"], "value_clip", "")
    tensors = {name: given[name] for name in ("values", "returns")}
    if clip is not None:
        if not finite(clip) or not clip >= 0:
            return "value_clip is no number >= 0"
        tensors["old_values"] = given["old_values"]
    mask = given["loss_mask"]
    if mask is None:
        return "there is no loss_mask"
    return unsuitable(**tensors) or misplaced(loss_mask=mask) or differing(**tensors, loss_mask=mask)


def _critic(given: Arguments) -> tuple[Tensor, float | None]:
    clip, mask = given["config"].value_clip, given["loss_mask"]
    out = value_loss(
        given["values"], given["returns"], mask, cliprange_value=clip,
        old_values=None if clip is None else given["old_values"],
        # a mean over all sequences, those without a token too
        loss_agg_mode="seq-mean-token-mean", num_items_in_batch=len(mask),
    )  # fmt: skip
    fraction, weights = torch.stack(
        [out.metrics[VALUE_METRICS.index("clip_fraction")], policy_losses.weights(mask)]
    ).tolist()
    if weights:
        raise Left(policy_losses.WEIGHTS)
    return out.loss, None if clip is None else fraction
