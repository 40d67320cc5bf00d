"""What ``patch`` returns, and the one that is in place."""

from __future__ import annotations

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.trl.prefix_sharing import PrefixSharing


class TrlPatch(CountedPatch):
    """What :func:`patch` returns: undo it, or read what it replaced and which calls went where."""

    def __init__(self) -> None:
        super().__init__("rlkernel.patch_trl", "TRL")
        self.prefix: PrefixSharing | None = None
        """What ``prefix_sharing`` did: ``patch.prefix.tokens``, ``patch.prefix.ratio``."""

    def apply(self) -> TrlPatch:
        global _active
        if _active is not None and _active is not self and _active.active:
            raise PatchError("no other patch of TRL must be in place, got one: undo it first")
        super().apply()
        _active = self
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if self.prefix is not None:
            self.prefix.models.undo()
        if was_active:
            self.sum_up()


_active: TrlPatch | None = None


def patch_in_place() -> TrlPatch | None:
    return _active if _active is not None and _active.active else None
