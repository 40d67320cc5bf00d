"""SWIFT's CPO and ORPO without logits: the method that they share, around TRL's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._scoring_calls import Labels
from rlkernel.integrations.hf.lm_head import IGNORED, HeadError
from rlkernel.integrations.swift import contract, preferences
from rlkernel.integrations.swift.swift_patch import SwiftPatch

MASKED = (0, IGNORED)  # what TRL puts for the labels of rows that it masks afterwards


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch."""
    mixin = importlib.import_module(contract.HOMES["cpo"]).RLHFTrainerMixin
    preferences.replace(
        patch, mixin, "concatenated_forward", _labels, lambda self: self.get_batch_logps, MASKED
    )


def _labels(batch: preferences.Batch) -> Labels:
    """The next token of every row, of the last too, as TRL logs the mean of all logits."""

    def labels(ids: Any, kwargs: dict[str, Any]) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise HeadError("CPO and ORPO must call their model with input_ids, [B, T]")
        return ids.roll(-1, 1).to(torch.int64)

    return labels
