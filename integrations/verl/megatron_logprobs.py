"""The same of logits whose vocabulary Megatron's ranks share out, for verl's Megatron engine."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel.integrations._replacing import shown, unfit_labels, unfit_logits
from rlkernel.integrations._shards import UNKNOWN, equal_shard, registered, targets_in
from rlkernel.integrations.verl import contract
from rlkernel.integrations.verl.verl_patch import VerlPatch
from rlkernel.ops.logprob import logprob

HOME = "verl.utils.megatron.tensor_parallel"  # which imports Megatron-Core
LOGPROBS = "vocab_parallel_log_probs_from_logits"
ENTROPY = "vocab_parallel_entropy"
CHUNKED = "vocab_parallel_entropy_with_chunking"


def plan(patch: VerlPatch) -> None:
    """Add what is replaced to a patch, as soon as a process of verl imports it."""
    if HOME in sys.modules:
        _plan(patch)
    else:
        patch.wait("logprobs over Megatron", HOME, functools.partial(_plan, patch))


def _plan(patch: VerlPatch) -> None:
    home = importlib.import_module(HOME)
    for name, make in ((LOGPROBS, _logprobs), (ENTROPY, _entropy), (CHUNKED, _chunked_entropy)):
        with patch.planning(name):
            original = contract.checked(home, name)
            new = shown(make(original, patch), original, "logprob")
            patch.replace_everywhere("verl", name, new, expected=original)


def _logprobs(original: Callable[..., Any], patch: VerlPatch) -> Callable[..., Any]:
    def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
        group, entries = _ranks(), logits.shape[-1]
        reason = unfit_logits(logits) or unfit_labels(logits, labels)
        if reason or group is None:
            patch.left(LOGPROBS, reason or UNKNOWN)
            return original(logits, labels)
        patch.count(patch.calls, LOGPROBS)
        ids = targets_in(group, entries, labels)
        return logprob(logits, ids, **equal_shard(group, entries)).logprobs

    return vocab_parallel_log_probs_from_logits


def _entropy(original: Callable[..., Any], patch: VerlPatch) -> Callable[..., Any]:
    def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
        reason, group = unfit_logits(vocab_parallel_logits), _ranks()
        if reason or group is None:
            patch.left(ENTROPY, reason or UNKNOWN)
            return original(vocab_parallel_logits)
        patch.count(patch.calls, ENTROPY)
        return _entropy_of(vocab_parallel_logits, group)

    return vocab_parallel_entropy


def _chunked_entropy(original: Callable[..., Any], patch: VerlPatch) -> Callable[..., Any]:
    def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
        reason, group = unfit_logits(vocab_parallel_logits), _ranks()
        if reason is None and vocab_parallel_logits.dim() != 3:  # verl's own is an error
            reason = "logits are not [B, L, V]"
        if reason or group is None:
            patch.left(CHUNKED, reason or UNKNOWN)
            return original(vocab_parallel_logits, chunk_size)
        patch.count(patch.calls, CHUNKED)
        return _entropy_of(vocab_parallel_logits, group)

    return vocab_parallel_entropy_with_chunking


def _ranks() -> ProcessGroup | None:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return registered(get_tensor_model_parallel_group())


def _entropy_of(logits: Tensor, group: ProcessGroup) -> Tensor:
    no_target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    shard = equal_shard(group, logits.shape[-1])
    entropy = logprob(logits, no_target, return_entropy=True, **shard).entropy
    assert entropy is not None
    return entropy
