"""A trainer's own function, in which the models that it calls score tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._logit_helpers import blind_helper
from rlkernel.integrations._replacing import unfit_temperature
from rlkernel.integrations._scoring_calls import Asked, scored_calls
from rlkernel.integrations.hf.lm_head import HeadError

# heads of models that do something to logits that their config does not tell
_strange: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def run_scored(
    patch: CountedPatch,
    original: Callable[..., Any],
    call: Callable[[], Any],
    models: list[Any],
    asked: Asked,
    reading: Sequence[Callable[..., Any]] = (),
) -> Any:
    """``call()``, which is of ``original``, where each of ``models`` that can score tokens does.

    Without the first of the models none does.  ``reading`` are the functions that compute something of
    logits, where it is not ``original`` that does.
    """
    name = original.__qualname__
    blind = (blind_helper(function) for function in reading or (original,))
    reason = unfit_temperature(asked.temperature) or next(filter(None, blind), None)
    if reason is None:
        try:
            with scored_calls(models, asked, _strange) as calls:
                result = call()
            for unable in calls.unable:
                patch.left(name, unable)
            if calls.made:
                patch.count(patch.calls, name)
            return result
        except HeadError as error:  # as a model is called for the first time
            reason = str(error)
    patch.left(name, reason)
    return call()
