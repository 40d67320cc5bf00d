"""A call of a trainer's function in which the model scores the labels of its batch and makes no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import pad

from rlkernel.integrations._replacing import misplaced
from rlkernel.integrations._scored_run import run_scored
from rlkernel.integrations._scoring_calls import Asked
from rlkernel.integrations.hf.lm_head import IGNORED
from rlkernel.integrations.llamafactory import contract
from rlkernel.integrations.llamafactory.head import MeanOfAll
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.integrations.llamafactory.scored_logits import TheirLogits


def scored(
    patch: LlamafactoryPatch,
    original: Callable[..., Any],
    call: Callable[[], Any],
    model: Any,
    labels: Any,
    *,
    means: bool = False,
) -> Any:
    """``call()``, which calls ``original`` once and may be made again; in it the one call of ``model`` scores
    ``labels``, and has the ``means`` of all of its logits."""
    if reason := misplaced(labels=labels):
        patch.left(original.__qualname__, reason)
        return call()
    told: tuple[Any, ...] = ("mean_logits",) if means else ()
    asked = Asked(
        statistics=told, labels=lambda _, __: pad(labels[:, 1:], (0, 1), value=IGNORED),
        framework=contract.FRAMEWORK, head=MeanOfAll, kind=TheirLogits,
    )  # fmt: skip
    return run_scored(patch, original, call, [model], asked)
