"""What the benchmark files share: finding an installed peer, and running a case under pytest-benchmark."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkernel.bench import parity
from rlkernel.bench.cases import Case
from rlkernel.bench.run import Contender


def module(path: str) -> ModuleType:
    """Import ``path`` of a peer.

    Raises:
        ImportError: it is not installed, or one of its own dependencies is not; says which.
    """
    package = path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ImportError("not installed")
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ImportError(f"{package} {_version(package)} does not import here: {error}") from error


def file(package: str, path: str, root: Path | None = None) -> ModuleType:
    """One file of a peer by itself, for a package whose ``__init__`` needs more than the file does."""
    if root is None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("not installed")
        root = Path(spec.submodule_search_locations[0])
    location = root / path
    name = f"rlkernel_bench_{package}_{location.stem}"
    found = importlib.util.spec_from_file_location(name, location)
    if found is None or found.loader is None or not location.exists():
        raise ImportError(f"{package} {_version(package)} has no {path}")
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


@functools.cache
def verl(path: str) -> ModuleType:
    """``verl.<path>``: verl's own files, also where ray, codetiming and tensordict, which its losses and
    advantages never use, are not installed.

    Raises:
        ImportError: verl is not installed, or one of its files does not import.
    """
    path = f"verl.{path}"
    try:
        return module(path)
    except ImportError:
        spec = importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise
    names = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers")
    folder = Path(spec.submodule_search_locations[0])
    fakes = {name: _bare(name, folder.joinpath(*name.split(".")[1:])) for name in names}
    for name, classes in _VERL_ONLY_IMPORTS.items():
        if name.startswith("verl.") or importlib.util.find_spec(name) is None:
            fakes[name] = _bare(name, None, *classes)
    before = {name: loaded for name, loaded in sys.modules.items() if _top(name) in ("verl", *fakes)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(fakes)
    try:
        groupwise = importlib.import_module("verl.utils.groupwise")
        for name in ("as_torch_index", "group_mean_std"):
            setattr(fakes["verl.utils"], name, getattr(groupwise, name))
        return importlib.import_module(path)
    finally:
        for name in [n for n in sys.modules if _top(n) in ("verl", *fakes)]:
            del sys.modules[name]
        sys.modules.update(before)


def verl_core_algos() -> ModuleType:
    return verl("trainer.ppo.core_algos")


# Modules of which those files take a name for an annotation, an isinstance or a container.
_VERL_ONLY_IMPORTS = {
    "verl.protocol": ("DataProto",),
    "verl.trainer.config": ("AlgoConfig",),
    "verl.trainer.config.algorithm": ("RolloutCorrectionConfig",),
    "verl.workers.config": ("ActorConfig",),
    "verl.workers.config.actor": ("PolicyLossConfig",),
    "tensordict": ("TensorDict",),
    "omegaconf": ("DictConfig",),
}


def _bare(name: str, folder: Path | None, *classes: str) -> ModuleType:
    """A module without its code: with a folder, a package whose other modules are real."""
    made = ModuleType(name)
    if folder is not None:
        made.__path__ = [str(folder)]
    for each in classes:
        setattr(made, each, type(each, (), {}))
    return made


def _top(name: str) -> str:
    return name.partition(".")[0]


@contextlib.contextmanager
def shrunk(path: str, name: str, scale: int) -> Iterator[None]:
    """Divide the constant ``name`` of the module ``path`` by ``scale`` inside the block."""
    owner = importlib.import_module(path)
    full = getattr(owner, name)
    setattr(owner, name, full // scale)
    try:
        yield
    finally:
        setattr(owner, name, full)


def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [package])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def parametrize(metafunc: Any, cases: list[Case], names: tuple[str, ...]) -> None:
    """The body of a benchmark file's ``pytest_generate_tests``: every case, both passes, every name."""
    metafunc.parametrize("name", names)
    metafunc.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
    metafunc.parametrize("case", cases, ids=[f"{case.name} {case.dtype}" for case in cases])


def pytest_benchmark(benchmark: Any, op: str, case: Case, backward: bool, name: str) -> None:
    """Time ``name`` ("rlkernel" or a peer) on ``case``; skipped with the reason where it cannot run."""
    import pytest  # rlkernel.bench runs without it

    own = importlib.import_module(f"rlkernel.benchmarks.{op}")
    case = case.replace(op=op, gradients=case.gradients or own.GRADIENTS)
    inputs = parity.make_inputs(own, case, "cpu")
    grads = parity.upstream(own, case, inputs)
    if name == "rlkernel":
        contender = Contender(name, parity.ours(op, "auto"), is_peer=False)
    else:
        peer = next(p for p in own.PEERS if p.name == name)
        try:
            contender = Contender(name, peer.load(), is_peer=True)
        except ImportError as error:
            pytest.skip(str(error))
    benchmark(contender.step(inputs, case, grads, backward))
