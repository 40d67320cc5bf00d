"""What ``patch`` returns."""

from __future__ import annotations

import importlib
from typing import Any

from typing_extensions import Self

from rlkernel.integrations._parts import PartsPatch


class SglangPatch(PartsPatch):
    """See ``PartsPatch``."""

    def __init__(self, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__("rlkernel.patch_sglang", "SGLang", parts, strict)

    def serves(self, part: str) -> bool:
        """Whether ``part`` was asked for, and not refused."""
        return part in self.parts and part not in self.refused

    def apply(self) -> Self:
        was_active = self.active
        super().apply()
        if not was_active and self.serves("sampler"):
            _backend().add()
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active and self.serves("sampler"):
            _backend().remove()


def _backend() -> Any:
    return importlib.import_module("rlkernel.integrations.sglang.backend")  # it imports SGLang
