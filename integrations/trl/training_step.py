"""A training step of TRL around its passes: whose it is, and the shuffle of its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkernel.integrations.trl.contract import METHOD, SHUFFLE, STEP
from rlkernel.integrations.trl.order import by_groups, drawn
from rlkernel.integrations.trl.prefix_sharing import PrefixSharing, Step


def watched_step(original: Callable[..., Tensor], sharing: PrefixSharing) -> Callable[..., Tensor]:
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        outer, sharing.step = sharing.step, Step(self)
        sharing.order.forget()
        try:
            loss = original(self, model, inputs, num_items_in_batch)
            if not sharing.step.scored:
                sharing.bypassing.add(self)
                sharing.left(METHOD, bypass(self))
        finally:
            sharing.step = outer
        return loss

    training_step.__qualname__ = STEP
    return training_step


def bypass(trainer: Any) -> str:
    """How a trainer computes its loss without the method that is packed."""
    name = type(trainer).__name__
    owner = next(base for base in type(trainer).__mro__ if METHOD in vars(base))
    if owner.__module__.startswith("trl.trainer."):
        return f"{name} computes its loss without it"
    return f"{owner.__name__} overrides it"


def group_shuffle(
    original: Callable[..., dict[str, Any]], sharing: PrefixSharing
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    patch = sharing.patch

    def shuffle_groups(seq_dict: dict[str, Any]) -> dict[str, Any]:
        prompts = seq_dict.get("prompt_ids")
        if not isinstance(prompts, Tensor) or prompts.ndim != 2:
            sharing.left(SHUFFLE, "no prompt_ids")
            return original(seq_dict)
        planned = sharing.order.take(len(prompts))
        if sharing.step is not None and (reason := _refusal(sharing.step.trainer, sharing)):
            sharing.left(SHUFFLE, reason)
            return original(seq_dict)
        patch.count(patch.calls, SHUFFLE)
        permutation = drawn(len(prompts))  # also with a plan: all random numbers after it stay TRL's
        order = by_groups(permutation, prompts) if planned is None else planned
        return {key: _permuted(values, order) for key, values in seq_dict.items()}

    shuffle_groups.__qualname__ = shuffle_groups.__name__
    return shuffle_groups


def _refusal(trainer: Any, sharing: PrefixSharing) -> str | None:
    """Why groups that stay together would be of no use to a trainer, or None."""
    if any(known is trainer for known in sharing.bypassing):
        return bypass(trainer)
    return sharing.refusal(trainer, trainer.model_wrapped)


def _permuted(values: Any, order: Tensor) -> Any:
    if values is None or (isinstance(values, Tensor) and values.ndim == 0):
        return values
    return (
        values[order.to(values.device)] if isinstance(values, Tensor) else [values[i] for i in order.tolist()]
    )
