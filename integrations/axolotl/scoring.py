"""axolotl's asynchronous GRPO, which scores tokens in methods of its own: the lm_head of its model does.

It makes logits as TRL before 1.15 does, and computes the same of them, padded or with all samples in one row
(``batch_flattening``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._replacing import shown
from rlkernel.integrations._scored_run import run_scored
from rlkernel.integrations._scoring_calls import Asked
from rlkernel.integrations.axolotl import contract
from rlkernel.integrations.trl import logits_head

LIGER = "use_liger_loss scores with Liger's kernel, which reads the logits"


def plan(patch: CountedPatch, asynchronous: ModuleType) -> None:
    """Add what is replaced to a patch."""
    logits_head.plan_helpers(patch, contract.ASYNCHRONOUS, [asynchronous])
    trainer = vars(asynchronous)[contract.TRAINER]
    for name in (contract.SCORES, contract.FLAT_SCORES, contract.FLAT_LOGPROBS):
        original = contract.checked(trainer, name)
        patch.replace(trainer, name, scored_method(original, patch), expected=original)


def scored_method(original: Callable[..., Any], patch: CountedPatch) -> Callable[..., Any]:
    signature = inspect.signature(original)
    padded = original.__name__ == contract.SCORES

    def scored(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, model, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        call = functools.partial(original, self, model, *args, **kwargs)
        if getattr(self, "use_liger_kernel", False) and not torch.is_grad_enabled():
            patch.left(original.__qualname__, LIGER)
            return call()
        asked = Asked(
            temperature=self.temperature,
            entropy=bool(given.get("compute_entropy")),
            padding=self.loss_type == "luspo",  # whose loss has the tokens behind a completion
            last=given["logits_to_keep"] if padded else None,
        )
        # without gradients it calls the model inside of the wrappers
        models = [model, self.accelerator.unwrap_model(model)]
        return run_scored(patch, original, call, models, asked)

    return shown(scored, original, "linear_logprob")
