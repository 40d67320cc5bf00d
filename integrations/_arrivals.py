"""Do something with a module as soon as it has been imported, by whomever."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Arrivals(MetaPathFinder):
    """A finder of modules that finds what the others find, and calls ``arrived`` once for each that has run,
    before its importer takes names from it.

    An error of ``arrived`` is one of the import.
    """

    def __init__(self, names: set[str], arrived: Callable[[str], None]) -> None:
        self.names = names
        self.arrived = arrived

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, Arrivals)]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec)
        return spec

    def _follow(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # that of its class
            run(module)
            if spec.name not in self.names:
                return
            self.names.discard(spec.name)
            if not self.names:
                self.end()
            self.arrived(spec.name)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # the loader is this spec's alone

    def begin(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
