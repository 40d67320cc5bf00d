"""What ``patch`` returns."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._environment import restore
from rlkernel.integrations._patch import PatchError


class OpenRlhfPatch(CountedPatch):
    """What ``patch`` returns: undo it, or read what it replaced and which calls went where.

    Its counts are those of this process.
    """

    def __init__(self, strict: bool) -> None:
        super().__init__("rlkernel.patch_openrlhf", "OpenRLHF")
        self.parts: tuple[str, ...] = ()
        self.strict = strict
        self.refused: dict[str, str] = {}
        """Which function, or part, is not replaced after all, and why."""
        self.environment: dict[str, str | None] = {}
        """What the environment held before; nothing where this process found the switch set."""

    def plan(self, parts: Iterable[str]) -> None:
        """Add parts, each of which has a module of its name; where the patch is on, they are put on too."""
        planned = len(self._plan), len(self._everywhere)
        for part in parts:
            with self.planning(part):
                importlib.import_module(f"rlkernel.integrations.openrlhf.{part}").plan(self)
            self.parts = (*self.parts, part)
        if self.active:
            self._done += self._placed(self._plan[planned[0] :], self._everywhere[planned[1] :])

    @contextmanager
    def planning(self, name: str) -> Iterator[None]:
        """What is planned inside belongs to ``name``: all of it, or none where it is refused."""
        planned = len(self._plan), len(self._everywhere)
        try:
            yield
        except (PatchError, ImportError, AttributeError) as error:
            del self._plan[planned[0] :], self._everywhere[planned[1] :]
            if self.strict:
                raise PatchError(f"{name} cannot be replaced: {error}") from error
            self.refused[name] = str(error)
            self.logger.warning("%s() leaves %s to OpenRLHF: %s", self.name, name, error)

    def undo(self) -> None:
        """Restore this process and its environment; a process that runs already stays as it is."""
        was_active = self.active
        super().undo()
        if was_active:
            from rlkernel.integrations.openrlhf.processes import wait_no_more

            wait_no_more()
            restore(self.environment)
            self.environment = {}
