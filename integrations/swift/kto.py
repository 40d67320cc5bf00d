"""SWIFT's KTO without logits: of completions, and of those to other prompts, by which it tells the KL."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from rlkernel.integrations._scoring_calls import Labels
from rlkernel.integrations.hf.lm_head import HeadError
from rlkernel.integrations.swift import contract, preferences
from rlkernel.integrations.swift.swift_patch import SwiftPatch


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch."""
    trainer = importlib.import_module(contract.HOMES["kto"]).KTOTrainer
    preferences.replace(patch, trainer, "forward", _labels, lambda self: self.get_per_token_logps)


def _labels(batch: preferences.Batch) -> Labels:
    def labels(ids: Any, kwargs: dict[str, Any]) -> Tensor:
        for kind in ("completion", "KL_completion"):
            if ids is not None and batch.get(f"{kind}_input_ids") is ids:
                return preferences.next_labels(batch.get(f"{kind}_labels"), kwargs)
        raise HeadError("KTO must call its model with the batch's own input_ids")

    return labels
