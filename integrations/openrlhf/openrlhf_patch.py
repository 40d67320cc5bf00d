"""What ``patch`` returns."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from rlkernel.integrations._parts import PartsPatch


class OpenRlhfPatch(PartsPatch):
    """See ``PartsPatch``; its parts are those that are on so far."""

    def __init__(self, strict: bool) -> None:
        super().__init__("rlkernel.patch_openrlhf", "OpenRLHF", (), strict)

    def plan(self, parts: Iterable[str]) -> None:
        """Add parts, each of which has a module of its name; where the patch is on, they are put on too."""
        planned = len(self._plan), len(self._everywhere)
        for part in parts:
            with self.planning(part):
                importlib.import_module(f"rlkernel.integrations.openrlhf.{part}").plan(self)
            self.parts = (*self.parts, part)
        if self.active:
            self._place(self._plan[planned[0] :], self._everywhere[planned[1] :])

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active:
            from rlkernel.integrations.openrlhf.processes import wait_no_more

            wait_no_more()
