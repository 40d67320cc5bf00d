"""A patch that counts which calls ran on rlkernel, and which were left to the framework and why."""

from __future__ import annotations

import logging
import warnings
from collections import Counter

import torch
from typing_extensions import Self

from rlkernel.integrations._patch import Patch, PatchError, alone


class CountedPatch(Patch):
    """A patch of a framework, one of its kind at a time, with its counts, which ``undo`` logs."""

    def __init__(self, name: str, framework: str) -> None:
        super().__init__(name)
        self.framework = framework
        self.logger = logging.getLogger(name)
        self.calls: Counter[str] = Counter()
        """How often rlkernel ran in place of which of the framework's functions."""
        self.fallbacks: Counter[str] = Counter()
        """How often the framework's own ran after all, and why. Neither counts what torch.compile traces."""
        self._told: set[str] = set()

    def count(self, counter: Counter[str], key: str) -> None:
        if not torch.compiler.is_compiling():  # it would guard on the number and compile anew every call
            counter[key] += 1

    def left(self, name: str, reason: str, advice: str = "", quiet: bool = False) -> None:
        """Count a call that the framework's own function serves after all, and warn of its reason once."""
        self.count(self.fallbacks, f"{name}: {reason}")
        if quiet or reason in self._told or torch.compiler.is_compiling():
            return
        self._told.add(reason)
        advice = advice and f" ({advice})"
        warnings.warn(f"{self.name}() leaves {name} to {self.framework}: {reason}{advice}", stacklevel=3)

    def apply(self) -> Self:
        with alone():
            if self.in_place() not in (None, self):
                raise PatchError(
                    f"no other patch of {self.framework} must be in place, got one: undo it first"
                )
            return super().apply()

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active:
            self._sum_up()

    def _sum_up(self) -> None:
        ran, left = self.calls.total(), self.fallbacks.total()
        reasons = "".join(f"\n  {times} x {reason}" for reason, times in self.fallbacks.most_common())
        level = logging.WARNING if self._told else logging.INFO
        self.logger.log(
            level, "%d calls ran on rlkernel, %d were left to %s%s", ran, left, self.framework, reasons
        )
