"""Log-probabilities and entropies of logits, which SkyRL's forward asks for once a micro-batch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import logprobs_of_logits, misplaced, shown, unfit_logits
from rlkernel.integrations.skyrl import contract, scoring
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch
from rlkernel.ops.logprob import entropy_from_logits

LOGPROBS = "logprobs_from_logits"
ENTROPY = "chunked_entropy_from_logits"


def plan(patch: SkyrlPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    home = importlib.import_module(contract.HOMES["logprobs"])
    for name, make in ((LOGPROBS, _logprobs), (ENTROPY, _entropy)):
        with patch.planning(name):
            original = contract.checked(home, name)
            new = shown(make(original, patch, home), original, "logprob")
            patch.replace_everywhere("skyrl", name, new, expected=original)


def _logprobs(original: Callable[..., Any], patch: SkyrlPatch, home: ModuleType) -> Callable[..., Any]:
    of_logits = logprobs_of_logits(patch, original, _unable, lambda: _has_flash_attn(home))

    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Any:
        if (found := scoring.current()) is not None:  # of ``fused_head``, whose logits are none
            return found.logprobs(logits, labels)
        return of_logits(logits, labels, inplace_backward)

    return logprobs_from_logits


def _has_flash_attn(home: ModuleType) -> bool:
    return bool(vars(home).get("FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False))


def _entropy(original: Callable[..., Any], patch: SkyrlPatch, home: ModuleType) -> Callable[..., Any]:
    def chunked_entropy_from_logits(
        logits: Tensor,
        requires_grad: bool = False,
        attention_mask: Tensor | None = None,
        chunk_size: int = 1024,
    ) -> Tensor:
        # of other dimensions SkyRL's own is an error
        reason = _unable(logits) or ("logits are not [B, L, V]" if logits.dim() != 3 else None)
        if reason is None and attention_mask is not None:
            reason = misplaced(attention_mask=attention_mask)
            if reason is None and attention_mask.shape != logits.shape[:-1]:
                reason = "attention_mask has not the shape of the rows of logits"
        if reason is not None:
            patch.left(ENTROPY, reason)
            return original(logits, requires_grad, attention_mask, chunk_size)
        patch.count(patch.calls, ENTROPY)
        with contextlib.nullcontext() if requires_grad else torch.no_grad():
            found = entropy_from_logits(logits)
            if attention_mask is None:
                return found
            return torch.where(attention_mask.bool(), found * attention_mask, 0)

    return chunked_entropy_from_logits


def _unable(logits: Any) -> str | None:
    if reason := unfit_logits(logits):
        return reason
    return None if logits.numel() else "logits are not [..., V] with rows"
