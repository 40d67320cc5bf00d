"""Losses of logits whose vocabulary ranks share out: log-probabilities, for trainers of RL."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel.integrations._replacing import shown, unfit_labels, unfit_logits
from rlkernel.integrations._shards import UNKNOWN, equal_shard, registered, targets_in
from rlkernel.integrations.megatron import contract
from rlkernel.integrations.megatron.megatron_patch import MegatronPatch
from rlkernel.ops.logprob import logprob

FUSED = "fused_vocab_parallel_cross_entropy"
PLAIN = "vocab_parallel_cross_entropy"
HOMES = {
    FUSED: "megatron.core.fusions.fused_cross_entropy",
    PLAIN: "megatron.core.tensor_parallel.cross_entropy",
}


def plan(patch: MegatronPatch) -> None:
    """Add what is replaced to a patch, in every module of Megatron that has imported it by name."""
    for name, make in ((FUSED, _fused), (PLAIN, _plain)):
        with patch.planning(name):
            original = contract.checked(importlib.import_module(HOMES[name]), name)
            new = shown(make(original, patch), original, "logprob")
            patch.replace_everywhere("megatron", name, new, expected=original)


def _fused(original: Callable[..., Any], patch: MegatronPatch) -> Callable[..., Any]:
    def fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any
    ) -> Any:
        reason, group = _unable(vocab_parallel_logits, target), registered(tp_group)
        if reason or group is None:
            patch.left(FUSED, reason or UNKNOWN)
            return original(vocab_parallel_logits, target, tp_group)
        patch.count(patch.calls, FUSED)
        return loss_of(vocab_parallel_logits, target, group)

    return fused_vocab_parallel_cross_entropy


def _plain(original: Callable[..., Any], patch: MegatronPatch) -> Callable[..., Any]:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
    ) -> Any:
        reason = "label_smoothing is asked for" if label_smoothing else _unable(vocab_parallel_logits, target)
        group = None if reason else registered(get_tensor_model_parallel_group())
        if group is None:
            patch.left(PLAIN, reason or UNKNOWN)
            return original(vocab_parallel_logits, target, label_smoothing)
        patch.count(patch.calls, PLAIN)
        return loss_of(vocab_parallel_logits, target, group)

    return vocab_parallel_cross_entropy


def loss_of(logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
    entries = logits.shape[-1]
    ids = targets_in(group, entries, target)
    return -logprob(logits, ids, **equal_shard(group, entries)).logprobs


def _unable(logits: Any, target: Any) -> str | None:
    return unfit_logits(logits) or unfit_labels(logits, target)
