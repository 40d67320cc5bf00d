"""The log-probabilities of labels of logits, where a model makes them after all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkernel.integrations._replacing import misplaced, shown, unfit_labels, unfit_logits
from rlkernel.integrations.hf.lm_head import IGNORED
from rlkernel.integrations.llamafactory import contract
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.integrations.llamafactory.scored_logits import TheirLogits, of_logits

NAME = "get_batch_logps"


def plan(patch: LlamafactoryPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    import llamafactory.train.trainer_utils as home

    original = contract.checked(home, NAME)
    new = shown(_batch_logps(original, patch), original, "logprob")
    patch.replace_everywhere("llamafactory", NAME, new, expected=original)


def _batch_logps(original: Callable[..., Any], patch: LlamafactoryPatch) -> Callable[..., Any]:
    """LLaMA-Factory's own sums, of tokens whose log-probabilities are made without a ``log_softmax``."""

    def get_batch_logps(
        logits: Tensor, labels: Tensor, label_pad_token_id: int = IGNORED, ld_alpha: float | None = None
    ) -> Any:
        if isinstance(logits, TheirLogits):
            return original(logits, labels, label_pad_token_id, ld_alpha)
        if reason := _unable(logits, labels):
            patch.left(NAME, reason)
            return original(logits, labels, label_pad_token_id, ld_alpha)
        patch.count(patch.calls, NAME)
        return original(of_logits(logits, labels, label_pad_token_id), labels, label_pad_token_id, ld_alpha)

    return get_batch_logps


def _unable(logits: Any, labels: Any) -> str | None:
    if reason := unfit_logits(logits) or misplaced(labels=labels):
        return reason
    if logits.dim() != 3:
        return "logits are not [B, T, V]"
    return unfit_labels(logits, labels)
