"""KTO: what ``CustomKTOTrainer`` computes of the logits of its policy and its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkernel.integrations._replacing import shown
from rlkernel.integrations.llamafactory import contract
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.integrations.llamafactory.scoring import scored

FORWARD = "forward"


def plan(patch: LlamafactoryPatch) -> None:
    """Add what is replaced to a patch."""
    import llamafactory.train.kto.trainer as home

    trainer = home.CustomKTOTrainer
    original = contract.checked(trainer, FORWARD)
    patch.replace(trainer, FORWARD, _forward(original, patch), expected=original)


def _forward(original: Callable[..., Any], patch: LlamafactoryPatch) -> Callable[..., Any]:
    def forward(self: Any, model: Any, batch: dict[str, Any], prefix: str = "") -> Any:
        labels = batch.get(f"{prefix}labels")
        # the means of its logits are logged, not those of the answers that estimate the divergence
        return scored(
            patch, original, lambda: original(self, model, batch, prefix), model, labels, means=not prefix
        )

    return shown(forward, original, "linear_logprob")
