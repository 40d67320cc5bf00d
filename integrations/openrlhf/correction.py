"""OpenRLHF's correction of the drift between vLLM and the trainer: its gates, and what it tells of them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.integrations._replacing import Arguments

SMALLEST = 1e-6  # of the probabilities whose divergence is taken, and of what is left of 1


class Gate(NamedTuple):
    """What it leaves of the tokens of PPO; GSPO takes the ratio to the rollout instead."""

    weights: Tensor  # [B, L], the bounded ratio, or 0 where a unit is rejected
    filtered: Tensor  # [] share of the units


def unable(loss: Any) -> str | None:
    low, high = loss.is_correction_threshold
    numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in (low, high))
    if not numbers or not low <= high or high < 0:
        return "is_correction_threshold is not LOW <= HIGH"
    return None


@torch.no_grad()
def gate(given: Arguments) -> Gate:
    """By the mean of a sequence's tokens, or of each token; a divergence is never below 0.

    In fp32 OpenRLHF's binary divergence of nearly equal policies is, and falls out of bounds that begin at 0.
    """
    loss, mask = given["self"], given["action_mask"] != 0
    old, rollout = given["old_log_probs"].double(), given["rollout_log_probs"].double()
    low, high = loss.is_correction_threshold
    ratio = (old - rollout).exp()
    if loss.is_correction_gating == "ratio":
        measure = old - rollout
    else:
        p, q = (x.exp().clamp(SMALLEST, 1 - SMALLEST) for x in (rollout, old))
        if loss.is_correction_gating == "tv":
            measure = (p - q).abs()
        else:
            measure = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).clamp(min=0)
    by_sequence = loss.is_correction_level == "seq"
    if by_sequence:  # NaN of a sequence without a token, which no bounds hold
        measure = torch.where(mask, measure, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    measure = measure.exp() if loss.is_correction_gating == "ratio" else measure
    within = (measure >= low) & (measure <= high)
    filtered = (~within).double().mean() if by_sequence else _mean((~within).double(), mask)
    if loss.is_correction_mode == "clip":  # which takes the ratio of a token alone
        weights = torch.where(mask, ratio.clamp(low, high), 0)
    else:
        weights = torch.where(within & mask, ratio, 0)
    return Gate(_single(weights, given), _single(filtered, given))


@torch.no_grad()
def mean_difference(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Over the tokens of the mask; 0 without one."""
    return _mean(x.double() - y.double(), mask != 0).to(torch.promote_types(x.dtype, torch.float32))


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def _single(x: Tensor, given: Arguments) -> Tensor:
    return x.to(torch.promote_types(given["log_probs"].dtype, torch.float32))
