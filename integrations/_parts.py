"""What doors of trainers share whose functions come in parts: the variables that ask for them, the patch."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from typing_extensions import Self

from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._environment import chosen, restore
from rlkernel.integrations._patch import PatchError, alone


class Asked(NamedTuple):
    parts: tuple[str, ...]
    strict: bool


def called(there: tuple[str, ...], parts: Iterable[str] | None, strict: bool) -> Asked:
    """What a call asks for, of the parts that are ``there``; None: all of them.

    Raises:
        ValueError: an argument is off.
    """
    if isinstance(parts, str):
        raise ValueError(f"parts must be names, got {parts!r}")
    wanted = there if parts is None else chosen(parts, there, "parts")
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    return Asked(wanted, strict)


class Switch:
    """The variable that names parts, or is "1" for all of them; and that which makes an error of what cannot
    be replaced."""

    def __init__(self, name: str, parts: tuple[str, ...]) -> None:
        self.name, self.strict, self.parts = name, f"{name}_STRICT", parts

    def called(self, parts: Iterable[str] | None, strict: bool) -> Asked:
        return called(self.parts, parts, strict)

    def is_strict(self) -> bool:
        return os.environ.get(self.strict) == "1"

    def asked(self) -> Asked | None:
        """What the environment asks for; None where it asks for nothing.

        Raises:
            ValueError: it names a part that there is not.
        """
        text = os.environ.get(self.name, "").strip()
        if text in ("", "0"):
            return None
        named = self.parts if text == "1" else [name.strip() for name in text.split(",") if name.strip()]
        return Asked(chosen(named, self.parts, self.name), self.is_strict())

    def variables(self, request: Asked) -> dict[str, str]:
        """What the environment of another process must hold to ask for the same."""
        return {self.name: ",".join(request.parts), self.strict: "1" if request.strict else "0"}


class PartsPatch(CountedPatch):
    """What ``patch`` returns: undo it, or read what it replaced and which calls went where.

    Its counts are those of this process.
    """

    def __init__(self, name: str, framework: str, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__(name, framework)
        self.parts = parts
        self.strict = strict
        self.refused: dict[str, str] = {}
        """Which function, or part, is not replaced after all, and why."""
        self.environment: dict[str, str | None] = {}
        """What the environment held before; nothing where this process found the switch set."""

    def asked_again(self, parts: Iterable[str] | None, wanted: Asked) -> Self:
        """For a second call while the patch is on, which must ask for the same parts, or for none."""
        if parts is not None and set(self.parts) != set(wanted.parts):
            raise PatchError(
                f"parts must be what the patch in place has, {self.parts}, got {wanted.parts}: undo it first"
            )
        return self.share()

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
            self.logger.warning("%s() leaves %s to %s: %s", self.name, name, self.framework, error)

    def undo(self) -> None:
        """Restore this process and its environment; a process that runs already stays as it is."""
        was_active = self.active
        super().undo()
        if was_active:
            restore(self.environment)
            self.environment = {}


class WaitingPatch(PartsPatch):
    """A patch some of whose parts wait for the framework's imports: of modules that not every process has."""

    def __init__(self, name: str, framework: str, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__(name, framework, parts, strict)
        self.waiting: dict[str, str] = {}
        """What is put in its place when which module of the framework has been imported."""
        self._plans: dict[str, Callable[[], None]] = {}
        self._arrivals = Arrivals(set(), self._arrived)

    def wait(self, name: str, home: str, plan: Callable[[], None]) -> None:
        """Call ``plan``, and put in place what it adds, when somebody has imported ``home``."""
        self.waiting[name] = home
        self._plans[name] = plan
        self._arrivals.names.add(home)

    def _arrived(self, home: str) -> None:
        for name in [name for name, module in self.waiting.items() if module == home]:
            del self.waiting[name]
            planned = len(self._plan), len(self._everywhere)
            self._plans.pop(name)()
            with self.planning(name):
                self._place(self._plan[planned[0] :], self._everywhere[planned[1] :])

    def apply(self) -> Self:
        super().apply()
        if self.waiting:
            self._arrivals.begin()
        return self

    def undo(self) -> None:
        super().undo()
        self._arrivals.end()


class ByParts(WaitingPatch):
    """A patch each of whose parts has a module of its name in ``package``, with its ``plan``, and is put in
    its place when the framework has imported the module that ``homes`` names."""

    def __init__(
        self,
        names: tuple[str, str],
        package: str,
        homes: Mapping[str, str],
        request: Asked,
    ) -> None:
        super().__init__(*names, *request)
        self.package, self.homes = package, homes
        self._on = False

    @property
    def active(self) -> bool:
        return self._on  # before anything of the framework is there to be replaced

    def plan(self, part: str) -> None:
        with self.planning(part):
            importlib.import_module(f"{self.package}.{part}").plan(self)

    def plans(self, name: str) -> bool:
        """Whether every module's attribute of this name is replaced."""
        return any(entry[1] == name for entry in self._everywhere)

    def wait_for(self, part: str) -> None:
        self.wait(part, self.homes[part], functools.partial(self.plan, part))

    def put(self, ready: Callable[[str], bool] = lambda part: False) -> Self:
        """Put those parts in their places whose modules are there, or are ``ready`` to be imported."""
        for part in self.pieces():
            if self.homes[part] in sys.modules or ready(part):
                self.plan(part)
            else:
                self.wait_for(part)
        return self.apply()

    def pieces(self) -> tuple[str, ...]:
        """What is put in place by itself: the parts, unless one has several of the framework's modules."""
        return self.parts

    def apply(self) -> Self:
        with alone():
            super().apply()
            self._on = True
        return self

    def undo(self) -> None:
        with alone():
            super().undo()
            self._on = False
