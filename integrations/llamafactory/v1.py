"""The log-probabilities of the trainers of ``USE_V1=1``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkernel.integrations._replacing import shown
from rlkernel.integrations.llamafactory import contract
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.integrations.llamafactory.scoring import scored

LOGPROBS, LABELS = "compute_log_probs", "labels"


def plan(patch: LlamafactoryPatch) -> None:
    """Add what is replaced to a patch."""
    import llamafactory.v1.core.base_trainer as home

    trainer = home.BaseTrainer
    original = contract.checked(trainer, LOGPROBS)
    patch.replace(trainer, LOGPROBS, _logprobs(original, patch), expected=original)


class Batch(dict[str, Any]):
    """A batch whose labels the model is not given, which would make logits for a loss that nobody reads."""

    def items(self) -> Any:
        return [(name, x) for name, x in super().items() if name != LABELS]


def _logprobs(original: Callable[..., Any], patch: LlamafactoryPatch) -> Callable[..., Any]:
    def compute_log_probs(self: Any, model: Any, batch: dict[str, Any]) -> Tensor:
        labels = batch[LABELS].to(self.device)
        found: Tensor = scored(
            patch, original, lambda: original(self, model, Batch(batch)), model, labels
        )  # fmt: skip
        return found

    return shown(compute_log_probs, original, "linear_logprob")
