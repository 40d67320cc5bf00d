"""DPO, ORPO and SimPO: what ``CustomDPOTrainer`` computes of the logits of its policy and its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkernel.integrations._replacing import shown
from rlkernel.integrations.llamafactory import contract, pair_losses
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.integrations.llamafactory.scoring import scored

FORWARD = "concatenated_forward"


def plan(patch: LlamafactoryPatch) -> None:
    """Add what is replaced to a patch."""
    import llamafactory.train.dpo.trainer as home

    trainer = home.CustomDPOTrainer
    original = contract.checked(trainer, FORWARD)
    patch.replace(trainer, FORWARD, _forward(original, patch), expected=original)
    pair_losses.plan(patch, trainer)


def _forward(original: Callable[..., Any], patch: LlamafactoryPatch) -> Callable[..., Any]:
    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any], is_ref_model: bool = False) -> Any:
        def call() -> Any:
            # without a reference it takes the labels out of the batch, where a second call must find them
            return original(self, model, dict(batch), is_ref_model)

        # the means of the policy's logits are logged
        return scored(patch, original, call, model, batch.get("labels"), means=not is_ref_model)

    return shown(concatenated_forward, original, "linear_logprob")
