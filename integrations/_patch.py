"""Replace attributes of modules and classes, and put them back.

A ``Patch`` is a plan: which attribute of which owner holds which object now, and what takes its place.
``apply()`` checks the whole plan before it touches anything; ``undo()`` checks the whole plan before it
restores anything. So a patch is either all there or not there at all, and neither direction ever overwrites
an object that it does not know.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

_lock = threading.RLock()  # of what patches hold and of ``_in_place``; nobody imports while it is held


def _after_fork() -> None:
    """The child of a fork has not the thread that held the lock, which would be held for ever."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def alone() -> AbstractContextManager[Any]:
    """``with alone():`` no other thread applies or undoes a patch.  What holds it imports nothing: who
    imports a module may wait for it (``_arrivals``)."""
    return _lock


ABSENT = object()
"""What an attribute holds that is not there: what is expected of one that a patch adds."""


class PatchError(RuntimeError):
    """The attribute to replace, or to restore, does not hold what it must hold."""


@dataclass(frozen=True)
class Replacement:
    """One attribute: what it must hold before the patch, and what it holds under it."""

    owner: Any
    name: str
    expected: Any
    new: Any

    @property
    def path(self) -> str:
        return f"{_describe(self.owner)}.{self.name}"

    def current(self) -> Any:
        # The owner's own dictionary: getattr would call descriptors, and trigger the imports of lazy modules.
        return vars(self.owner).get(self.name, ABSENT)

    def require(self, wanted: Any, action: str) -> None:
        found = self.current()
        if found is not wanted:
            raise PatchError(
                f"cannot {action} {self.path}: it must hold {_describe(wanted)}, got {_describe(found)} "
                "(something else has replaced it since)"
            )


class Patch:
    """A set of replacements that is applied and undone as one.

    A ``with`` over it leaves the patch as it found it: off, except inside another ``with`` or where a further
    caller was handed a patch that was on already (``share``).  Threads that apply and undo at the same time
    do so one after the other.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._plan: list[Replacement] = []
        self._everywhere: list[tuple[str, str, Any, Any]] = []
        self._done: list[Replacement] = []
        self._entered: list[bool] = []
        self._unclaimed = False

    # the plan

    def replace(self, owner: Any, name: str, new: Any, *, expected: Any) -> None:
        """Plan that ``owner.name``, which must be ``expected`` (``ABSENT``: nothing), becomes ``new``."""
        self._plan.append(Replacement(owner, name, expected, new))

    def replace_everywhere(self, package: str, name: str, new: Any, *, expected: Any) -> None:
        """Plan the same for every loaded module of ``package`` whose ``name`` is ``expected``.

        For functions that their users import by name. A module that is imported later takes ``new`` from its
        home, so ``undo()`` looks through the package again.
        """
        self._everywhere.append((package, name, expected, new))

    # its life

    @classmethod
    def in_place(cls) -> Self | None:
        """The patch of this kind that is on."""
        return next((patch for patch in _in_place if isinstance(patch, cls)), None)

    @property
    def active(self) -> bool:
        """Whether it is on: also one that has found nothing to replace."""
        return bool(self._done) or any(patch is self for patch in _in_place)

    @property
    def replaced(self) -> dict[str, str]:
        """What stands in place of what: ``{"module.attribute": "its replacement"}``."""
        return {entry.path: _describe(entry.new) for entry in self._done}

    def apply(self) -> Self:
        """Put the replacements in place; without effect while they are."""
        began = False
        try:
            with alone():
                if self.active:
                    return self
                began = True
                self._place(self._plan, self._everywhere)
                self._unclaimed = True
                _in_place.append(self)
        except BaseException:  # an interrupt may come behind any of these lines
            if began:
                with alone():
                    self._take_back(0)
                    self._unclaimed = False
                    _in_place[:] = [patch for patch in _in_place if patch is not self]
            raise
        return self

    def _place(self, plan: list[Replacement], everywhere: list[tuple[str, str, Any, Any]]) -> None:
        """Put a plan in place: all of it, or nothing where something is not what it must be."""
        before = None
        try:
            with alone():
                modules = _modules(everywhere)
                found = plan + [
                    Replacement(module, name, expected, new)
                    for package, name, expected, new in everywhere
                    for module in _holders(modules[package], name, expected)
                ]
                for entry in found:
                    entry.require(entry.expected, "patch")
                before = len(self._done)
                for entry in found:
                    self._done.append(entry)  # first: an interrupt between the two would leave it unknown
                    setattr(entry.owner, entry.name, entry.new)
        except BaseException:
            if before is not None:
                with alone():
                    self._take_back(before)
            raise

    def _take_back(self, first: int) -> None:
        """Restore what was put in place from the entry ``first`` on, the last of which may not have been."""
        _restore([entry for entry in self._done[first:] if entry.current() is entry.new])
        del self._done[first:]

    def undo(self) -> None:
        """Restore everything in reverse order; without effect while the patch is off.

        Raises ``PatchError``, and restores nothing, when an attribute holds neither what this patch put there
        nor what was there before.
        """
        with alone():
            if not self.active:
                return
            self.require_in_place()
            modules = _modules(self._everywhere)
            late = [
                Replacement(module, name, expected, new)
                for package, name, expected, new in self._everywhere
                for module in _holders(modules[package], name, new)
                if not any(entry.owner is module and entry.name == name for entry in self._done)
            ]
            self._done += late
            try:
                while self._done:  # what an interrupt leaves can be undone by another call
                    self._take_back(len(self._done) - 1)
            finally:
                if not self._done:
                    self._unclaimed = False
                    _in_place[:] = [patch for patch in _in_place if patch is not self]

    def require_in_place(self) -> None:
        """Raise PatchError where ``undo`` would."""
        for entry in self._done:
            if entry.current() is not entry.expected:  # which an undo that was interrupted has restored
                entry.require(entry.new, "undo")

    def share(self) -> Self:
        """The same patch for a further caller, whose ``with`` then does not undo it."""
        self._unclaimed = False
        return self

    def __enter__(self) -> Self:
        was_active, depth = self.active, len(self._entered)
        try:
            self.apply()
            with alone():
                self._entered.append(self._unclaimed)
                self._unclaimed = False
        except BaseException:  # an interrupt: nobody would call __exit__
            del self._entered[depth:]
            if self.active and not was_active:
                self.undo()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered.pop():
            self.undo()

    def __repr__(self) -> str:
        if not self._done:
            return f"<{self.name}: nothing replaced>"
        lines = "".join(f"\n  {path} -> {new}" for path, new in self.replaced.items())
        return f"<{self.name}:{lines}>"


_in_place: list[Patch] = []  # in the order in which they were applied


def in_place(name: str) -> Patch | None:
    """The patch of this name that is on."""
    return next((patch for patch in _in_place if patch.name == name), None)


def undo_all() -> list[str]:
    """Undo every patch, the last one first; their names.

    Raises:
        PatchError: some could not be undone, because something else has replaced what they put there.  The
            others are.
    """
    undone, refused = [], []
    for patch in reversed(list(_in_place)):
        try:
            patch.undo()
            undone.append(patch.name)
        except PatchError as error:
            refused.append(str(error))
    if refused:
        raise PatchError("; ".join(refused))
    return undone


def _restore(entries: list[Replacement]) -> None:
    for entry in reversed(entries):
        if entry.expected is ABSENT:
            delattr(entry.owner, entry.name)
        else:
            setattr(entry.owner, entry.name, entry.expected)


def _modules(everywhere: list[tuple[str, str, Any, Any]]) -> dict[str, list[Any]]:
    """Of each package in which something is replaced everywhere: its modules that are loaded."""
    return {package: _loaded(package) for package in {entry[0] for entry in everywhere}}


def _loaded(package: str) -> list[Any]:
    return [
        module
        for path, module in sorted(sys.modules.items())
        if (path == package or path.startswith(package + ".")) and hasattr(module, "__dict__")
    ]


def _holders(modules: list[Any], name: str, value: Any) -> list[Any]:
    """Those whose own ``name`` is ``value``."""
    return [module for module in modules if vars(module).get(name) is value]


def _describe(thing: Any) -> str:
    if thing is ABSENT:
        return "nothing"
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if name is None:
        return repr(thing)
    return f"{module}.{name}" if module else str(name)
