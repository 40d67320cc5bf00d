"""SWIFT's trainers of preferences without logits: what their functions that call a model have in common."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import shown
from rlkernel.integrations._scored_run import run_scored
from rlkernel.integrations._scoring_calls import Asked, Labels
from rlkernel.integrations.hf.lm_head import IGNORED, HeadError
from rlkernel.integrations.swift import contract
from rlkernel.integrations.swift.models import shared_out, with_policy
from rlkernel.integrations.swift.swift_patch import SwiftPatch

Batch = Mapping[str, Any]
READING = "get_per_token_logps"  # what DPO and KTO compute of logits


def replace(
    patch: SwiftPatch,
    trainer: Any,
    method: str,
    labels: Callable[[Batch], Labels],
    reading: Callable[[Any], Callable[..., Any]],
    masked: tuple[int, ...] = (),
) -> None:
    """Plan that a method of a trainer, which calls a model with a batch, has log-probabilities.

    ``labels`` are those of a batch, and ``reading`` is the trainer's function that computes something of
    logits.
    """
    with patch.planning(f"{trainer.__name__}.{method}"):
        original = contract.checked(trainer, method)
        contract.checked(importlib.import_module(contract.HOMES["cpo"]).RLHFTrainerMixin, READING)

        def scored(self: Any, model: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, self, model, batch, *args, **kwargs)
            if reason := shared_out(self):
                patch.left(original.__qualname__, reason)
                return call()
            asked = Asked(
                statistics=("mean_logits",), of_all=True, labels=labels(batch),
                framework=contract.FRAMEWORK, masked=masked,
            )  # fmt: skip
            return run_scored(patch, original, call, with_policy(self, model), asked, [reading(self)])

        patch.replace(trainer, method, shown(scored, original, "linear_logprob"), expected=original)


def next_labels(labels: Any, kwargs: dict[str, Any]) -> Tensor:
    """What SWIFT makes of a batch's labels, for the rows of which it asks for logits."""
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        raise HeadError("the batch must have labels, [B, T]")
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor):  # of one row: the places before a label, and the last
        labels = labels.roll(-1, 1)
        labels[:, -1:] = IGNORED
        return labels[:, keep].to(torch.int64)
    return labels[:, -(keep or labels.shape[1]) :].roll(-1, 1).to(torch.int64)
