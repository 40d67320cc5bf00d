"""Log-probabilities and entropies of logits, which verl's engines call once a micro-batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from rlkernel.integrations._replacing import logprobs_of_logits, shown, unfit_logits
from rlkernel.integrations.verl import contract, megatron_logprobs
from rlkernel.integrations.verl.verl_patch import VerlPatch
from rlkernel.ops.logprob import entropy_from_logits as entropy_of

LOGPROBS = "logprobs_from_logits"
ENTROPY = "entropy_from_logits"
CHUNKED = "entropy_from_logits_with_chunking"


def plan(patch: VerlPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    import verl.utils.torch_functional as home

    for name, make in ((LOGPROBS, _logprobs), (ENTROPY, _entropy), (CHUNKED, _chunked_entropy)):
        with patch.planning(name):
            original = contract.checked(home, name)
            new = shown(make(original, patch, home), original, "logprob")
            patch.replace_everywhere("verl", name, new, expected=original)
    megatron_logprobs.plan(patch)


def _logprobs(original: Callable[..., Any], patch: VerlPatch, home: ModuleType) -> Callable[..., Any]:
    return logprobs_of_logits(patch, original, unfit_logits, lambda: _has_flash_attn(home))


def _has_flash_attn(home: ModuleType) -> bool:
    found = getattr(home, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)  # spelled so there
    return found and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1"


def _entropy(original: Callable[..., Any], patch: VerlPatch, home: ModuleType) -> Callable[..., Any]:
    def entropy_from_logits(logits: Tensor) -> Tensor:
        if reason := unfit_logits(logits):
            patch.left(ENTROPY, reason)
            return original(logits)
        patch.count(patch.calls, ENTROPY)
        return entropy_of(logits)

    return entropy_from_logits


def _chunked_entropy(original: Callable[..., Any], patch: VerlPatch, home: ModuleType) -> Callable[..., Any]:
    def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
        # of more dimensions verl's own is an error
        if reason := unfit_logits(logits) or ("logits are not [N, V]" if logits.dim() != 2 else None):
            patch.left(CHUNKED, reason)
            return original(logits, chunk_size)
        patch.count(patch.calls, CHUNKED)
        return entropy_of(logits)

    return entropy_from_logits_with_chunking
