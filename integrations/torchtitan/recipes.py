"""Recipes of torchtitan, with rlkernel under their losses."""

from __future__ import annotations

from typing import Any, TypeVar

from rlkernel.integrations.torchtitan import contract

Recipe = TypeVar("Recipe")


def fused(recipe: Recipe) -> Recipe:
    """The recipe, in which ``FusedLoss`` computes each loss of logits.

    Of torchtitan's own losses these are ``ChunkedLossWrapper`` around any loss, ``CrossEntropyLoss``,
    ``GRPOLoss`` and ``DAPOLoss``.  A loss of somebody else that no wrapper is around stays:
    name it in a ``FusedLoss.Config(loss_fn=...)``.

    Args:
        recipe: the configuration of a trainer, or one that has such; it is changed in place.

    Raises:
        ImportError: torchtitan is not installed. PatchError: its wrapper is not the one that is known.
        ValueError: there is no such loss in it.
    """
    losses = contract.losses()
    from rlkernel.integrations.torchtitan.fused_loss import FusedLoss

    whole: Any = recipe
    found = 0
    for _, loss, parent, name in list(whole.traverse(losses.BaseLoss.Config)):
        if isinstance(loss, FusedLoss.Config):
            found += 1
            continue
        if type(loss) is losses.ChunkedLossWrapper.Config:
            inner = loss.loss_fn
        elif contract.is_of_logits(loss):
            inner = loss
        else:
            continue
        if parent is None:
            raise ValueError("recipe must have a loss, got one: FusedLoss.Config(loss_fn=...) is around it")
        setattr(parent, name, FusedLoss.Config(loss_fn=inner))
        found += 1
    if not found:
        raise ValueError("recipe must have a loss of logits that FusedLoss knows, got none")
    return recipe
