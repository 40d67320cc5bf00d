"""Models on packed attention while a patch is on, and what they were on before."""

from __future__ import annotations

import weakref
from typing import Any

from rlkernel.consistency.mode import suspended
from rlkernel.integrations import hf


class Models:
    """Models that were put on packed attention, until ``undo()``."""

    def __init__(self) -> None:
        self._former: list[tuple[weakref.ref[Any], Any]] = []
        self._doubts: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()

    def doubt(self, model: Any) -> str | None:
        """Why packed batches are not to be trusted to a model: a tiny one shows it, once for each model."""
        if hf.is_sharded(model):
            return None
        found = hf.causal_lm(model)
        if found not in self._doubts:
            with suspended():  # errors in fp64, which batch_invariant refuses
                self._doubts[found] = next(iter(hf.verify(model)), None)
        return self._doubts[found]

    def attach(self, model: Any) -> None:
        """Put a model on packed attention; ordinary calls stay what they are."""
        found = hf.causal_lm(model)
        if not _is_packed(found):
            self._former.append((weakref.ref(found), hf.use_packed(found)))

    def undo(self) -> None:
        """Put each model back on what it was on, unless somebody has chosen another attention since."""
        while self._former:
            model, former = self._former.pop()
            if (found := model()) is not None and _is_packed(found):
                found.set_attn_implementation(former)


def _is_packed(model: Any) -> bool:
    return hf.is_registered(model.config.get_text_config()._attn_implementation)
