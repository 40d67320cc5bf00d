"""What ``patch`` returns."""

from __future__ import annotations

from typing_extensions import Self

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl.trl_patch import TrlPatch


class AxolotlPatch(CountedPatch):
    """What ``patch`` returns.  Its counts are of axolotl's own methods, ``patch.trl`` has those of TRL's."""

    def __init__(self, trl: TrlPatch, brought: bool) -> None:
        super().__init__("rlkernel.patch_axolotl", "axolotl")
        self.trl = trl
        """The patch of TRL under it."""
        self._brought = brought  # whether it came with this one, and leaves with it

    @property
    def replaced(self) -> dict[str, str]:
        """What stands in place of what, in TRL and in axolotl."""
        return self.trl.replaced | super().replaced if self.active else {}

    @property
    def notes(self) -> dict[str, str]:
        return self.trl.notes

    def apply(self) -> Self:
        if self.active:
            return self
        self.trl.apply()
        try:
            return super().apply()
        except BaseException:  # neither stays without the other
            if self._brought:
                self.trl.undo()
            raise

    def require_in_place(self) -> None:
        super().require_in_place()
        if self._brought:
            self.trl.require_in_place()

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active and self._brought:
            self.trl.undo()
