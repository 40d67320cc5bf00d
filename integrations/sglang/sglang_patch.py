"""What ``patch`` returns."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from typing_extensions import Self

import rlkernel
from rlkernel.integrations._parts import PartsPatch


class SglangPatch(PartsPatch):
    """See ``PartsPatch``."""

    def __init__(self, parts: tuple[str, ...], strict: bool, batch_invariant: bool = False) -> None:
        super().__init__("rlkernel.patch_sglang", "SGLang", parts, strict)
        self.batch_invariant = batch_invariant
        """Whether a request has the bits that transformers has under ``rlkernel.batch_invariant``."""
        self._mode = contextlib.ExitStack()

    def serves(self, part: str) -> bool:
        """Whether ``part`` was asked for, and not refused."""
        return part in self.parts and part not in self.refused

    def apply(self) -> Self:
        was_active = self.active
        super().apply()
        if not was_active and self.serves("sampler"):
            _backend().add()
        if not was_active and self.batch_invariant and "batch_invariant" not in self.refused:
            self._mode.enter_context(rlkernel.batch_invariant(strict=False))
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active:
            self._mode.close()
        if was_active and self.serves("sampler"):
            _backend().remove()


def _backend() -> Any:
    return importlib.import_module("rlkernel.integrations.sglang.backend")  # it imports SGLang
