"""The real ``verl.trainer.ppo.core_algos``: imported, or its file with stand-ins for what it only imports.

verl's package needs a tracking service, a cluster runtime and more before its loss functions can be called.
The functions themselves, and ``verl.utils.torch_functional`` which they call, are verl's code either way.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

STUBBED = ("omegaconf", "tensordict", "verl", "verl.utils", "verl.utils.torch_functional")
STUBBED += ("verl.utils.device", "verl.utils.import_utils", "verl.trainer", "verl.trainer.config")
STUBBED += ("verl.workers", "verl.workers.config")


class Stub(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


@cache
def core_algos() -> types.ModuleType:
    """Skips the test where verl is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("verl.trainer.ppo.core_algos")
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not installed")
    pytest.importorskip("transformers", reason="verl's functions need transformers")
    root = Path(found.submodule_search_locations[0])
    with _stubs() as stubs:
        stubs["verl.utils.import_utils"].deprecated = lambda *a, **k: lambda function: function
        functional = _load("verl_torch_functional", root / "utils/torch_functional.py")
        stubs["verl.utils"].torch_functional = functional
        sys.modules["verl.utils.torch_functional"] = functional
        return _load("verl_core_algos", root / "trainer/ppo/core_algos.py")


@contextlib.contextmanager
def _stubs() -> Iterator[dict[str, Stub]]:
    before = {name: sys.modules.get(name) for name in STUBBED}
    stubs = {name: Stub(name) for name in STUBBED}
    for name, stub in stubs.items():
        if "." in name:
            setattr(stubs[name.rpartition(".")[0]], name.rpartition(".")[2], stub)
    sys.modules.update(stubs)
    try:
        yield stubs
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
