"""Preference losses of the log-probabilities of whole sequences, as trainers of pairs have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.preference_loss import PreferenceLossOutput
from rlkernel.integrations._replacing import WIDE, finite, unsuitable
from rlkernel.ops.preference_loss import preference_loss


def unfit_pairs(policy: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """Why these are not log-probabilities of pairs, [B] each: chosen ones, rejected ones."""
    logps = {**policy, **reference}
    if reason := unsuitable(WIDE, **logps):
        return reason
    first, *others = logps.values()
    if first.dim() != 1 or not first.numel():
        return "logps are not [B] with a pair"
    if any(x.shape != first.shape or x.device != first.device or x.dtype != first.dtype for x in others):
        return "logps have not one shape, dtype and device"
    if torch.is_grad_enabled() and any(x.requires_grad for x in reference.values()):
        return "the reference requires a gradient"
    return None


def unfit_beta(beta: Any) -> str | None:
    return None if finite(beta) and beta > 0 else "beta is no number above 0"


def loss_of_pairs(
    policy: dict[str, Tensor], reference: dict[str, Tensor], **options: Any
) -> PreferenceLossOutput:
    """``preference_loss`` of the pairs, of which a sequence is one token."""
    logps = torch.cat([*policy.values()])[:, None]
    mask = torch.ones_like(logps, dtype=torch.bool)
    return preference_loss(logps, torch.cat([*reference.values()]) if reference else None, mask, **options)
