"""What ``patch`` returns."""

from __future__ import annotations

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl.prefix_sharing import PrefixSharing


class TrlPatch(CountedPatch):
    """What :func:`patch` returns: undo it, or read what it replaced and which calls went where."""

    def __init__(self) -> None:
        super().__init__("rlkernel.patch_trl", "TRL")
        self.prefix: PrefixSharing | None = None
        """What ``prefix_sharing`` did: ``patch.prefix.tokens``, ``patch.prefix.ratio``."""

    def undo(self) -> None:
        super().undo()
        if self.prefix is not None:
            self.prefix.models.undo()
