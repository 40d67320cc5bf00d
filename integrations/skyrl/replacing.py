"""What stands in the place of one of SkyRL's functions, and comes through pickle as that of its process."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import Arguments, Table
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch


class Left(Exception):
    """Why a call is left to SkyRL after all, found while it ran."""


class Place(NamedTuple):
    """Where a function is found in any process."""

    module: str
    name: str
    registry: str | None = None  # whose entry of that name it is


class Replaced:
    """In the place of ``original``: ``run`` with its arguments by name, unless ``unable`` has a reason, of
    which one may be so common that nobody is warned of it.

    SkyRL hands its registries to a process of Ray's by pickle, and each process takes from there what it has
    not itself.  A patch is of one process, so what goes there is where the function is found.
    """

    def __init__(
        self,
        patch: SkyrlPatch,
        original: Callable[..., Any],
        op: str,
        unable: Callable[[Arguments], str | None],
        run: Callable[[Arguments], Any],
        place: Place,
        *,
        quiet: str = "",
    ) -> None:
        functools.update_wrapper(self, original)
        self.__module__, self.__qualname__ = "rlkernel", op
        self.patch, self.original, self.unable, self.run, self.place = patch, original, unable, run, place
        self.signature, self.quiet = inspect.signature(original), quiet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            if reason := self.unable(bound.arguments):
                raise Left(reason)
            found = self.run(bound.arguments)
        except Left as left:
            reason = str(left)
            self.patch.left(self.original.__name__, reason, quiet=reason == self.quiet)
            return self.original(*args, **kwargs)
        self.patch.count(self.patch.calls, self.original.__name__)
        return found

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str | None, ...]]:
        return found_at, tuple(self.place)


def found_at(module: str, name: str, registry: str | None) -> Any:
    home = importlib.import_module(module)
    return vars(home)[name] if registry is None else vars(home)[registry]._functions[name]


def replace_entry(
    patch: SkyrlPatch,
    place: Place,
    function: Callable[..., Any],
    make: Callable[[Callable[..., Any], Place], Replaced],
) -> None:
    """An entry of a registry, which must be ``function``, or what SkyRL's decorators made on the way to it: a
    function of the user's may wrap SkyRL's too, and does something else."""
    assert place.registry is not None
    table = vars(importlib.import_module(place.module))[place.registry]._functions
    entry = table.get(place.name)
    known = [function]
    while (inner := getattr(known[-1], "__wrapped__", None)) is not None:
        known.append(inner)
    if not any(entry is one for one in known):
        raise PatchError(f"the registry's {place.name!r} must be SkyRL's own {function.__name__}")
    owner = Table(f"{place.module}.{place.registry}", table)
    patch.replace(owner, place.name, make(entry, place), expected=entry)
