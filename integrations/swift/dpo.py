"""SWIFT's DPO without logits: its policy's, and its reference's."""

from __future__ import annotations

import importlib

from rlkernel.integrations._scoring_calls import Labels
from rlkernel.integrations.swift import contract, preferences
from rlkernel.integrations.swift.swift_patch import SwiftPatch


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch."""
    trainer = importlib.import_module(contract.HOMES["dpo"]).DPOTrainer
    preferences.replace(
        patch, trainer, "concatenated_forward", _labels, lambda self: self.get_per_token_logps
    )


def _labels(batch: preferences.Batch) -> Labels:
    return lambda _, kwargs: preferences.next_labels(batch.get("labels"), kwargs)
