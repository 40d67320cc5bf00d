"""What ``patch`` returns."""

from __future__ import annotations

import importlib

from typing_extensions import Self

from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations._parts import PartsPatch
from rlkernel.integrations.skyrl.contract import HOMES


class SkyrlPatch(PartsPatch):
    """See ``PartsPatch``; and what waits for SkyRL's imports."""

    def __init__(self, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__("rlkernel.patch_skyrl", "SkyRL", parts, strict)
        self.waiting: dict[str, str] = {}
        """Which part is put in its place when which module of SkyRL has been imported."""
        self._arrivals = Arrivals(set(), self._arrived)
        self._on = False

    @property
    def active(self) -> bool:
        return self._on  # before anything of SkyRL is there to be replaced

    def plan(self, part: str) -> None:
        with self.planning(part):  # each has a module of its name, with its plan
            importlib.import_module(f"rlkernel.integrations.skyrl.{part}").plan(self)

    def plans(self, name: str) -> bool:
        """Whether every module's attribute of this name is replaced."""
        return any(entry[1] == name for entry in self._everywhere)

    def wait(self, part: str) -> None:
        self.waiting[part] = HOMES[part]
        self._arrivals.names.add(HOMES[part])

    def _arrived(self, home: str) -> None:
        for part in [part for part, name in self.waiting.items() if name == home]:
            del self.waiting[part]
            planned = len(self._plan), len(self._everywhere)
            self.plan(part)
            with self.planning(part):
                self._done += self._placed(self._plan[planned[0] :], self._everywhere[planned[1] :])

    def apply(self) -> Self:
        super().apply()
        self._on = True
        if self.waiting:
            self._arrivals.begin()
        return self

    def undo(self) -> None:
        super().undo()
        self._arrivals.end()
        self._on = False
