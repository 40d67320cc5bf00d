"""The losses of TRL's trainers of distillation, without TRL's tensors of the logits' size.

``GKDTrainer`` and ``GOLDTrainer`` have logits, of which ``divergence`` is the loss; ``DistillationTrainer``
has hidden states and both lm_heads (``linear_distillation``).  What has them takes seconds to import, and is
waited for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import (
    NARROW,
    Arguments,
    finite,
    fraction,
    misplaced,
    replacement,
    unfit_temperature,
    unsuitable,
)
from rlkernel.integrations.trl import contract
from rlkernel.integrations.trl.linear_distillation import DivergenceHead
from rlkernel.ops.divergence import divergence

IGNORED = -100
REDUCTIONS = ("batchmean", "sum", "mean")


class Distillation:
    """The part of a ``TrlPatch`` that replaces a trainer's loss when its module is there."""

    def __init__(self, patch: CountedPatch) -> None:
        self.patch = patch
        self._plans: dict[str, Callable[[ModuleType], None]] = {
            contract.GKD: functools.partial(self._plan_of_logits, "GKDTrainer"),
            contract.GOLD: functools.partial(self._plan_of_logits, "GOLDTrainer"),
            contract.KERNELS: self._plan_divergence,
        }
        self._arrivals = Arrivals(set(self._plans), self._arrived)

    def begin(self) -> None:
        """Replace in the modules that are here, some since the patch was off, and wait for the others."""
        for name in sorted(self._arrivals.names & sys.modules.keys()):
            self._arrivals.names.discard(name)
            self._arrived(name)
        if self._arrivals.names:
            self._arrivals.begin()

    def end(self) -> None:
        self._arrivals.end()

    def _arrived(self, name: str) -> None:
        """Of a version whose loss is another one, nothing is replaced."""
        plan, everywhere = self.patch._plan, self.patch._everywhere
        before = len(plan), len(everywhere)
        self._plans[name](sys.modules[name])
        self.patch._place(plan[before[0] :], everywhere[before[1] :])

    def _plan_of_logits(self, name: str, module: ModuleType) -> None:
        if contract.is_before("1.9"):  # whose loss is not divided by the items of the batch
            return
        trainer = getattr(module, name)
        if (original := self._checked(trainer, contract.JSD)) is not None:
            new = replacement(self.patch, original.__func__, "divergence", _unable, _loss)
            self.patch.replace(trainer, contract.JSD, staticmethod(new), expected=original)

    def _plan_divergence(self, module: ModuleType) -> None:
        """``DistillationTrainer``'s module takes it by name; under TRL 1.15 every step of it does."""
        if (original := self._checked(module, contract.DIVERGENCE)) is not None:
            new = DivergenceHead(original, self.patch, sys.modules["trl.trainer.utils"])
            self.patch.replace_everywhere("trl", contract.DIVERGENCE, new, expected=original)

    def _checked(self, owner: Any, name: str) -> Any:
        try:
            return contract.checked(owner, name)
        except PatchError as error:
            self.patch.logger.warning("%s() leaves it to TRL: %s", self.patch.name, error)
            return None


def _unable(given: Arguments) -> str | None:
    student, teacher, labels = (given[name] for name in ("student_logits", "teacher_logits", "labels"))
    if given.get("logits_are_probs"):  # GOLD's of two tokenizers
        return "logits_are_probs is set"
    if reason := unsuitable(NARROW, student_logits=student, teacher_logits=teacher):
        return reason
    if student.dim() < 2 or student.shape != teacher.shape or not student.shape[-1]:
        return "student_logits and teacher_logits are not [..., V] of one shape"
    if teacher.requires_grad:
        return "teacher_logits requires a gradient"
    if labels is not None:
        if reason := misplaced(labels=labels):
            return reason
        if labels.shape != student.shape[:-1] or len({x.device for x in (student, teacher, labels)}) > 1:
            return "labels have not the shape and the device of the rows of the logits"
    if not fraction(given["beta"]):
        return "beta is no number in [0, 1]"
    if given["num_items_in_batch"] is None and given["reduction"] not in REDUCTIONS:
        return f"reduction is {given['reduction']!r}"
    items = given["num_items_in_batch"]
    if not (items is None or isinstance(items, Tensor) or finite(items)):
        return "num_items_in_batch is no number"
    return unfit_temperature(given["temperature"])


def _loss(given: Arguments) -> Any:
    logits, labels, items = given["student_logits"], given["labels"], given["num_items_in_batch"]
    mask = None if labels is None else labels != IGNORED
    options = {name: given[name] for name in ("beta", "temperature")}
    rows = divergence(logits, given["teacher_logits"], mask=mask, **options).divergence
    total = rows.sum()
    if items is not None:
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)
    if given["reduction"] == "sum":
        return total
    if given["reduction"] == "mean":  # over the vocabulary too
        return total / ((rows.numel() if mask is None else mask.sum()) * logits.shape[-1])
    return total / (max(len(rows), 1) if mask is None else mask.sum().clamp_min(1))
