"""Log-probabilities and entropies of logits, which the actor makes where its head is not fused."""

from __future__ import annotations

from torch import Tensor

from rlkernel.integrations._replacing import (
    Arguments,
    replacement,
    unfit_labels,
    unfit_logits,
    unfit_temperature,
)
from rlkernel.integrations.openrlhf import contract
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch
from rlkernel.ops.logprob import entropy_from_logits, logprob

LOGPROBS = "log_probs_from_logits"
ENTROPY = "compute_entropy"


def plan(patch: OpenRlhfPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    import openrlhf.models.utils as home

    for name, unable, run in ((LOGPROBS, _unable, _logprobs), (ENTROPY, _unable_logits, _entropy)):
        with patch.planning(name):
            original = contract.checked(home, name)
            new = replacement(patch, original, "logprob", unable, run)
            patch.replace_everywhere("openrlhf", name, new, expected=original)


def _logprobs(given: Arguments) -> Tensor:
    logits = given["logits"]
    found = logprob(logits, given["labels"], temperature=given["temperature"]).logprobs
    return found.to(logits.dtype)


def _entropy(given: Arguments) -> Tensor:
    logits = given["logits"]
    return entropy_from_logits(logits).to(logits.dtype)


def _unable(given: Arguments) -> str | None:
    logits = given["logits"]
    reason = unfit_logits(logits) or unfit_labels(logits, given["labels"])
    return reason or unfit_temperature(given["temperature"])


def _unable_logits(given: Arguments) -> str | None:
    return unfit_logits(given["logits"])
