"""What ``patch`` returns, and the one that is in place."""

from __future__ import annotations

from typing import Any

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import PatchError


class DeepSpeedPatch(CountedPatch):
    """What :func:`patch` returns: undo it, or read what it replaced and which calls went where."""

    def __init__(self, trainer_module: Any) -> None:
        super().__init__("rlkernel.patch_deepspeed", "DeepSpeed")
        self.trainer_module = trainer_module

    def apply(self) -> DeepSpeedPatch:
        global _active
        if _active is not None and _active is not self and _active.active:
            raise PatchError("no other patch of DeepSpeed must be in place, got one: undo it first")
        super().apply()
        _active = self
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active:
            self.sum_up()


_active: DeepSpeedPatch | None = None


def patch_in_place() -> DeepSpeedPatch | None:
    return _active if _active is not None and _active.active else None
