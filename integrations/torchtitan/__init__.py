"""torchtitan: ``FusedLoss``, its ``ChunkedLossWrapper`` without logits.

A recipe names it, ``loss=FusedLoss.Config(loss_fn=GRPOLoss.Config())``, or ``fused(recipe)`` puts it there:
torchtitan's trainers give the lm_head to whatever is a ``ChunkedLossWrapper``, so nothing is patched, and a
configuration that travels to other processes takes the loss with it.
"""

from __future__ import annotations

from typing import Any

from rlkernel.integrations.torchtitan.recipes import fused

__all__ = ["FusedLoss", "fused", "stands_for"]  # noqa: F822  # one of them by __getattr__


def stands_for() -> dict[str, str]:
    """What a recipe may name in place of what, once all of it that is relied upon has been looked at.

    Raises:
        ImportError: torchtitan is not installed. PatchError: its wrapper is not the one that is known.
    """
    from rlkernel.integrations.torchtitan.fused_loss import FusedLoss

    wrapper = FusedLoss.__mro__[1]
    return {f"{wrapper.__module__}.{wrapper.__qualname__}": f"{FusedLoss.__module__}.FusedLoss, in a recipe"}


def __getattr__(name: str) -> Any:  # its base is torchtitan's
    if name == "FusedLoss":
        from rlkernel.integrations.torchtitan.fused_loss import FusedLoss

        return FusedLoss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
