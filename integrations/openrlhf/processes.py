"""How the other processes of OpenRLHF come to be patched: Ray's actors, and what DeepSpeed's launcher starts.

OpenRLHF has no plugins.  Ray has two hooks: ``ray.init`` hands the runtime environment to the function that
``RAY_RUNTIME_ENV_HOOK`` names, and a runtime environment may name a function that every worker calls as it
starts.  The first, ``runtime_env``, adds the second, ``in_worker``, and that waits for OpenRLHF's models: a
worker that never imports them, such as one of vLLM's, which OpenRLHF keeps free of DeepSpeed, stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rlkernel.integrations.openrlhf import switch
from rlkernel.integrations.openrlhf.install import register

# behind whose import which parts can be put on; OpenRLHF itself imports the first for the second
WHERE = {
    "openrlhf.models": ("logprobs", "fused_head", "losses"),
    "openrlhf.trainer.ppo_utils.experience_maker": ("advantages",),
}
WORKER, SETUP = "rlkernel.integrations.openrlhf.in_worker", "worker_process_setup_hook"


def watch() -> None:
    """Put on what the environment asks for, each part as soon as its modules are there."""
    if switch.asked() is None:
        return
    later = {}
    for name, parts in WHERE.items():
        if name in sys.modules:
            register(parts)
        else:
            later[name] = parts
    if later and not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(later))


def wait_no_more() -> None:
    """What has not been imported yet stays OpenRLHF's own."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]


def in_worker() -> None:
    """What a worker of Ray calls as it starts."""
    watch()


def runtime_env(given: Any) -> dict[str, Any]:
    """The runtime environment ``given`` to ``ray.init``, whose workers are patched."""
    if before := os.environ.get(switch.BEFORE):
        given = _named(before)(given)
    switch.ask()  # also where this hook was named and nothing else
    watch()
    result = dict(given or {})
    own = {name: os.environ[name] for name in (switch.SWITCH, switch.STRICT) if name in os.environ}
    result["env_vars"] = own | dict(result.get("env_vars") or {})
    theirs = result.get(SETUP)
    if theirs is None:
        result[SETUP] = WORKER
    elif theirs != WORKER:
        result[SETUP] = _both(theirs)
    return result


def _both(theirs: Any) -> Callable[[], None]:
    def set_up() -> None:  # no module has it by this name, so it travels by value
        from rlkernel.integrations.openrlhf.processes import _named, in_worker

        (_named(theirs) if isinstance(theirs, str) else theirs)()
        in_worker()

    return set_up


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class AfterImport(importlib.abc.MetaPathFinder):
    """Registers the parts of a module once it has been imported, before its importer takes names from it."""

    def __init__(self, later: dict[str, tuple[str, ...]]) -> None:
        self.later = later

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.later:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for x in others if (found := x.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self, name: str) -> None:
        parts = self.later.pop(name, ())
        if not self.later and self in sys.meta_path:
            sys.meta_path.remove(self)
        register(parts)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: AfterImport) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.finder.imported(module.__name__)
