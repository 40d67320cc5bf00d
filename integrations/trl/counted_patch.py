"""A patch that counts which calls ran on rlkernel, and which were left to TRL and why."""

from __future__ import annotations

import logging
import warnings
from collections import Counter

import torch

from rlkernel.integrations._patch import Patch

logger = logging.getLogger("rlkernel.patch_trl")


class CountedPatch(Patch):
    """A patch of TRL with its counts, which ``sum_up`` logs."""

    def __init__(self) -> None:
        super().__init__("rlkernel.patch_trl")
        self.calls: Counter[str] = Counter()
        """How often rlkernel ran in place of which TRL function."""
        self.fallbacks: Counter[str] = Counter()
        """How often TRL's own function ran after all, and why. Neither counts what torch.compile traces."""
        self._told: set[str] = set()

    def count(self, counter: Counter[str], key: str) -> None:
        if not torch.compiler.is_compiling():  # it would guard on the number and compile anew every call
            counter[key] += 1

    def left(self, name: str, reason: str, advice: str = "", quiet: bool = False) -> None:
        """Count a call that TRL's own function serves after all, and warn of its reason once."""
        self.count(self.fallbacks, f"{name}: {reason}")
        if quiet or reason in self._told or torch.compiler.is_compiling():
            return
        self._told.add(reason)
        advice = advice and f" ({advice})"
        warnings.warn(f"rlkernel.patch_trl() leaves {name} to TRL: {reason}{advice}", stacklevel=3)

    def sum_up(self) -> None:
        ran, left = self.calls.total(), self.fallbacks.total()
        reasons = "".join(f"\n  {times} x {reason}" for reason, times in self.fallbacks.most_common())
        level = logging.WARNING if self._told else logging.INFO
        logger.log(level, "%d calls ran on rlkernel, %d were left to TRL%s", ran, left, reasons)
