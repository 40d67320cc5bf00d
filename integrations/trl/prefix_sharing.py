"""What a patch with ``prefix_sharing`` knows of the trainers that it packs."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlkernel.integrations import hf
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl.models import Models
from rlkernel.integrations.trl.order import Order
from rlkernel.integrations.trl.reasons import ADVICE, NOTHING, model_reason, wrapper_reason

MIN_RATIO = 1.1  # with less to share, a step gains about what packing costs


@dataclass
class Step:
    """A training step that is under way."""

    trainer: Any
    scored: bool = False  # whether its loss has come to the method that is packed


class PrefixSharing:
    """The part of a ``TrlPatch`` that packs the passes of TRL's trainers and keeps their groups together."""

    def __init__(
        self,
        patch: CountedPatch,
        min_ratio: float | None,
        required: bool = False,
        shared_dropout: bool = False,
    ) -> None:
        self.patch = patch
        self.min_ratio = MIN_RATIO if min_ratio is None else min_ratio
        self.required, self.shared_dropout = required, shared_dropout
        self.tokens: Counter[str] = Counter()
        """Tokens of TRL's padded batches ("padded"), and the rows that ran in their place ("packed")."""
        self.order = Order()
        self.step: Step | None = None
        self.bypassing: weakref.WeakSet[Any] = weakref.WeakSet()  # trainers whose losses do not come here
        self.models = Models()
        self._rows = self._unlabelled = 0

    @property
    def ratio(self) -> float:
        """How many tokens of TRL's padded batches each packed row stood for, 1 before the first."""
        return self.tokens["padded"] / self.tokens["packed"] if self.tokens["packed"] else 1.0

    def left(self, name: str, reason: str) -> None:
        """Count, and warn of or refuse, what runs as in TRL."""
        quiet = reason == NOTHING  # there is nothing to share
        advice = next((advice for part, advice in ADVICE.items() if part in reason), "")
        self.patch.left(name, reason, advice, quiet or self.required)
        if self.required and not quiet:
            advice = advice and f" ({advice})"
            raise RuntimeError(f"{name} must run packed (prefix_sharing='require'), got: {reason}{advice}")

    def refusal(self, trainer: Any, model: Any) -> str | None:
        """Why none of a trainer's batches can run packed through a model, or None."""
        model_inside = trainer.accelerator.unwrap_model(model)
        if reason := wrapper_reason(trainer, model, model_inside):
            return reason
        if reasons := hf.check_model(model_inside):
            return reasons[0]
        if reason := model_reason(model_inside, self.shared_dropout):
            return reason
        return self.models.doubt(model)

    @contextlib.contextmanager
    def labels_after(self, n_prefix: int, rows: int) -> Iterator[None]:
        """Inside, the head's first rows have no label. Off GPUs, TRL hands it all rows nevertheless."""
        self._rows, self._unlabelled = rows, n_prefix
        try:
            yield
        finally:
            self._rows = self._unlabelled = 0

    def unlabelled(self, rows: int) -> int:
        """How many of the head's rows have no label, all in front."""
        return self._unlabelled if rows == self._rows else 0
