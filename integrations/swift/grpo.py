"""SWIFT's GRPO without logits: the lm_head of each model that scores completions makes log-probabilities."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import shown
from rlkernel.integrations._scored_run import run_scored
from rlkernel.integrations._scoring_calls import Asked
from rlkernel.integrations.hf.lm_head import IGNORED, HeadError
from rlkernel.integrations.swift import contract
from rlkernel.integrations.swift.models import shared_out, with_policy
from rlkernel.integrations.swift.swift_patch import SwiftPatch

METHOD = "_get_per_token_logps_and_entropies_single"
READING = "_get_logps_via_local_forward"


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch."""
    trainer = importlib.import_module(contract.HOMES["grpo"]).GRPOTrainer
    with patch.planning(f"{trainer.__name__}.{METHOD}"):
        reading = contract.checked(trainer, READING)
        original = contract.checked(trainer, METHOD)
        new = shown(_scored(original, patch, reading), original, "linear_logprob")
        patch.replace(trainer, METHOD, new, expected=original)


def _scored(
    original: Callable[..., Any], patch: SwiftPatch, reading: Callable[..., Any]
) -> Callable[..., Any]:
    def scored(
        self: Any, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, compute_entropy: bool = False
    ) -> Any:
        call = functools.partial(original, self, model, model_inputs, grpo_batch, compute_entropy)
        if reason := shared_out(self):
            patch.left(original.__qualname__, reason)
            return call()
        labels = completion_labels(model_inputs["input_ids"], grpo_batch, self.template.padding_free)
        asked = Asked(
            temperature=self.temperature, entropy=bool(compute_entropy),
            labels=lambda _, kwargs: kept(labels, kwargs), framework=contract.FRAMEWORK,
        )  # fmt: skip
        return run_scored(patch, original, call, with_policy(self, model), asked, [reading])

    return scored


def completion_labels(ids: Tensor, batch: Any, padding_free: bool) -> Tensor:
    """The next token of each place of ``ids``, [B, T] or packed [1, N], where it is one of a completion."""
    last = batch.logits_to_keep
    wanted = batch.completion_mask
    if padding_free:  # one row for each sequence, at its end
        places = torch.arange(last, device=wanted.device)
        wanted = wanted[places >= last - batch.seq_lengths[:, None]][None]
    labels = torch.full_like(ids, IGNORED, dtype=torch.int64)
    if wanted.shape != (ids.shape[0], last) or not 0 < last < ids.shape[1]:
        labels[:, :-1] = ids[:, 1:]
    else:
        labels[:, -last - 1 : -1] = torch.where(wanted.bool(), ids[:, -last:], IGNORED)
    return labels


def kept(labels: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Those of the rows of which the model is asked for logits."""
    keep = kwargs.get("logits_to_keep") or labels.shape[1]
    if not isinstance(keep, int):
        raise HeadError(f"logits_to_keep must be a number in GRPO, got {type(keep).__name__}")
    return labels[:, -keep:]
