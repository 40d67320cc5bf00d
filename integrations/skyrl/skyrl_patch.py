"""What ``patch`` returns."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import Self

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._environment import restore
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.skyrl.arrivals import Arrivals
from rlkernel.integrations.skyrl.contract import HOMES


class SkyrlPatch(CountedPatch):
    """What ``patch`` returns: undo it, or read what it replaced and which calls went where.

    Its counts are those of this process.
    """

    def __init__(self, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__("rlkernel.patch_skyrl", "SkyRL")
        self.parts = parts
        self.strict = strict
        self.refused: dict[str, str] = {}
        """Which function, or part, is not replaced after all, and why."""
        self.environment: dict[str, str | None] = {}
        """What the environment held before; nothing where this process found the switch set."""
        self.waiting: dict[str, str] = {}
        """Which part is put in its place when which module of SkyRL has been imported."""
        self._arrivals = Arrivals(set(), self._arrived)
        self._on = False

    @property
    def active(self) -> bool:
        return self._on  # before anything of SkyRL is there to be replaced

    @contextmanager
    def planning(self, name: str) -> Iterator[None]:
        """What is planned inside belongs to ``name``: all of it, or none where it is refused."""
        planned = len(self._plan), len(self._everywhere)
        try:
            yield
        except (PatchError, ImportError, AttributeError) as error:
            if self.strict:
                raise PatchError(f"{name} cannot be replaced: {error}") from error
            del self._plan[planned[0] :], self._everywhere[planned[1] :]
            self.refused[name] = str(error)
            self.logger.warning("%s() leaves %s to SkyRL: %s", self.name, name, error)

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
        self._arrivals.names.discard(home)
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
        """Restore this process and its environment; a process that runs already stays as it is."""
        was_active = self.active
        super().undo()
        if was_active:
            self._arrivals.end()
            self._on = False
            restore(self.environment)
            self.environment = {}
