"""Log-probabilities and entropies of logits, which every engine of AReaL gathers once a micro-batch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import (
    Arguments,
    replacement,
    unfit_labels,
    unfit_logits,
    unfit_temperature,
)
from rlkernel.integrations._shards import IGNORED, UNKNOWN, equal_shard, registered, targets_in
from rlkernel.integrations.areal import contract, scoring
from rlkernel.integrations.areal.areal_patch import ArealPatch
from rlkernel.ops.logprob import logprob

LOGPROBS = "gather_logprobs"
ENTROPY = "gather_logprobs_entropy"
NEVER = torch.iinfo(torch.int64).min  # a label that nobody has: one outside the vocabulary is an error here


def plan(patch: ArealPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    home = importlib.import_module(contract.HOMES["logprobs"])
    for name, run in ((LOGPROBS, _logprobs), (ENTROPY, _with_entropy)):
        with patch.planning(name):
            original = contract.checked(home, name)
            new = scoring.asking(replacement(patch, original, "logprob", _unable, run))
            patch.replace_everywhere("areal", name, new, expected=original)


def _logprobs(given: Arguments) -> Tensor:
    found: Tensor = _gathered(given, False).logprobs
    return found


def _with_entropy(given: Arguments) -> tuple[Tensor, Tensor]:
    found = _gathered(given, True)
    return found.logprobs, found.entropy


def _gathered(given: Arguments, return_entropy: bool) -> Any:
    logits, labels, group = given["logits"], given["labels"], given["tp_group"]
    score = functools.partial(
        logprob, logits, temperature=given["temperature"], return_entropy=return_entropy
    )
    if not _shared_out(group):
        return score(labels, ignore_index=NEVER)
    ranks = registered(group)
    assert ranks is not None  # _unable has seen to it
    entries = logits.shape[-1]
    return score(targets_in(ranks, entries, labels), ignore_index=IGNORED, **equal_shard(ranks, entries))


def _shared_out(group: Any) -> bool:
    return group is not None and torch.distributed.get_world_size(group) > 1


def _unable(given: Arguments) -> str | None:
    """Why AReaL's own is called, also where it tells of an error."""
    logits, labels, chunk = given["logits"], given["labels"], given["chunk_size"]
    if reason := unfit_logits(logits) or unfit_labels(logits, labels):
        return reason
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return f"labels are {labels.dtype}"
    if not logits.numel():
        return "logits are not [..., V] with rows"
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        return "chunk_size is no number above 0"
    if _shared_out(given["tp_group"]) and registered(given["tp_group"]) is None:
        return UNKNOWN
    return unfit_temperature(given["temperature"])
