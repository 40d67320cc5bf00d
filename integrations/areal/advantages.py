"""Generalised advantages of AReaL's PPO, whose walk over the tokens is a loop in Python.

AReaL has no function of that walk: it is the middle of a method that makes rewards before and normalises
after.  That method runs as it is, over a batch that looks one token long, of which the walk has no step; its
rewards and its mask are of all tokens.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import Arguments, Seen, fraction, misplaced, replacement, unsuitable
from rlkernel.integrations.areal import contract
from rlkernel.integrations.areal.areal_patch import ArealPatch
from rlkernel.ops.gae import gae

METHOD = "_compute_advantages"


def plan(patch: ArealPatch) -> None:
    """Add what is replaced to a patch."""
    kind = importlib.import_module(contract.HOMES["advantages"]).PPOActor
    original = contract.checked_text(kind, METHOD)

    def run(given: Arguments) -> Any:
        return _advantages(original, given["self"], given["data"])

    patch.replace(kind, METHOD, replacement(patch, original, "gae", _unable, run), expected=original)


def _advantages(original: Any, actor: Any, data: dict[str, Any]) -> dict[str, Any]:
    tokens = data["input_ids"]
    data["input_ids"] = tokens[:, :1]
    try:
        data = original(Seen(actor, adv_norm=None), data)
    finally:
        data["input_ids"] = tokens
    rewards, mask = data["tot_rewards"], data["loss_mask"]
    values = data.get("values", torch.zeros_like(rewards))
    cut_off = data["attention_mask"].sum(-1) == tokens.shape[1]
    found = gae(
        rewards[:, :-1], values[:, :-1], mask[:, :-1], gamma=actor.discount, lam=actor.gae_lambda,
        last_values=torch.where(cut_off, values[:, -1], 0),
    )  # fmt: skip
    advantages = torch.nn.functional.pad(_carried(found.advantages, mask[:, :-1]), (0, 1))
    data["returns"] = advantages + values
    data["advantages"] = advantages if actor.adv_norm is None else actor.adv_norm(advantages, mask)
    return data


def _carried(advantages: Tensor, mask: Tensor) -> Tensor:
    """AReaL has the advantage of the token that follows under the mask, and 0 behind the last."""
    length = mask.shape[1]
    places = torch.arange(length, device=mask.device).where(mask != 0, length)
    following = places.flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(advantages, (0, 1)).gather(1, following)


def _unable(given: Arguments) -> str | None:
    """Why AReaL's own is called, also where it tells of an error."""
    actor, data = given["self"], given["data"]
    names = "input_ids", "attention_mask", "loss_mask", "logprobs"
    if not isinstance(data, dict) or not all(name in data for name in names):
        return "the batch lacks what advantages are made of"
    if reason := misplaced(**{name: data[name] for name in names}):
        return reason
    shape, device = data["input_ids"].shape, data["input_ids"].device
    if len(shape) != 2 or shape[1] < 2 or not shape[0]:
        return "input_ids are not [B, L] with L >= 2"
    floats = {name: data.get(name) for name in ("logprobs", "prox_logp", "ref_logp", "values")}
    floats = {name: x for name, x in floats.items() if x is not None}
    if reason := unsuitable((torch.float32,), **floats):
        return reason
    for name, x in ({name: data[name] for name in names} | floats).items():
        if x.shape != shape or x.device != device:
            return f"{name} has not input_ids' shape and device"
        if x.requires_grad:
            return f"{name} requires a gradient"
    if not (fraction(actor.discount) and fraction(actor.gae_lambda)):
        return "discount and gae_lambda are no numbers in [0, 1]"
    mask = data["loss_mask"]
    return "loss_mask holds other numbers than 0 and 1" if ((mask != 0) & (mask != 1)).any() else None
