"""What ``patch`` returns."""

from __future__ import annotations

import functools
import importlib

from typing_extensions import Self

from rlkernel.integrations._parts import WaitingPatch
from rlkernel.integrations.skyrl.contract import HOMES


class SkyrlPatch(WaitingPatch):
    """See ``WaitingPatch``."""

    def __init__(self, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__("rlkernel.patch_skyrl", "SkyRL", parts, strict)
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

    def wait_for(self, part: str) -> None:
        self.wait(part, HOMES[part], functools.partial(self.plan, part))

    def apply(self) -> Self:
        super().apply()
        self._on = True
        return self

    def undo(self) -> None:
        super().undo()
        self._on = False
