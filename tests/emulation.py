"""Builds csrc/emulation: the device kernels for the CPU, as a Python module, also under sanitizers.

Each op is one object, of the very source that nvcc (warps of 32) or clang (64) compiles.  An object is kept
in build/emulation under a name made of its sources and flags: an unchanged one costs nothing, and a planted
fault costs that of one op.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CXX = os.environ.get("CXX", "g++")
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
FLAGS = ["-std=c++17", "-ffp-contract=off", *WARNINGS, "-DRLKERNEL_EMULATION"]
SANITIZERS = ["-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
VENDOR = {32: "cuda", 64: "hip"}  # whose sources run with warps of so many threads
Faults = Mapping[str, tuple[str, str]]  # header: (text that stands there once, replacement)


@cache
def module(warp: int) -> types.ModuleType:
    """The kernels with warps of 32 or 64 threads; `rlkernel.native.emulated(module(64))` runs ops on them."""
    return load(build_module(warp))


def build_module(
    warp: int, faults: Faults | None = None, sanitizers: Sequence[str] = (), sources: str = ""
) -> Path:
    """Compiles the module, with `faults` planted in its headers, as sources see them whose names match."""
    include = f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_path('include')}"
    common = ["-fPIC", "-fvisibility=hidden", *sanitizers]
    op_flags = ["-O0" if sanitizers else "-O1", *common]
    objects = _objects(warp, faults, sources, common, op_flags, [*common, *include])
    # a name of its own: Python takes two extensions of one name for the same
    name = f"emulated{warp}_{hashlib.sha256(repr((faults, *sanitizers)).encode()).hexdigest()[:8]}"
    flags = ["-shared", f"-Wl,--defsym=PyInit_{name}=PyInit_emulated", *sanitizers]
    return _link(objects, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}", flags)


@contextmanager
def left_out(kernels: types.ModuleType, header: str, barrier: str) -> Iterator[None]:
    """Without the barrier of a header whose comment starts so: a fault that costs no compile."""
    lines = (CSRC / "include/rlkernel" / header).read_text().splitlines()
    start = re.compile(rf"(syncthreads|barrier)\(\);  // {re.escape(barrier)}")
    found = [number for number, line in enumerate(lines, 1) if start.search(line)]
    assert len(found) == 1, f"{header} must hold one barrier {barrier!r}, got {len(found)}"
    kernels.leave_out(header, found[0])
    try:
        yield
    finally:
        kernels.leave_out()
        kernels.configure()


def run_sanitized(warp: int, faults: Faults | None = None) -> subprocess.CompletedProcess[str]:
    """Calls of every kernel under the sanitizers, in a process of their own."""
    modules = build_module(warp, faults, SANITIZERS), build_module(warp)
    libraries = (
        subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    )
    # Python keeps what it has allocated
    environment = {**os.environ, "LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, str(Path(__file__).parent / "sanitized.py"), *map(str, modules)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _objects(
    warp: int,
    faults: Faults | None,
    sources: str,
    common: list[str],
    op_flags: list[str],
    module_flags: list[str],
) -> list[Path]:
    """Of the emulation, of every op, and of the module, which takes the longest and is one for both warps;
    those of a fault first, where a linker takes inline functions from."""
    define = f"-DRLKERNEL_WARP={warp}"
    op_flags = [*op_flags, define, "-x", "c++"]
    ops = {p.stem: p for p in sorted((CSRC / VENDOR[warp]).iterdir()) if p.stem != "errors"}
    host = CSRC / "emulation"
    jobs = [(host / "module.cpp", module_flags, None)]
    jobs += [(host / name, [*common, define], None) for name in ("emulation.cpp", "primitives.cpp")]
    showing = _showing(next(iter(faults)), ops) if faults else []
    for name in filter(re.compile(sources).search, showing):
        jobs.insert(0, (ops.pop(name), [*op_flags, "-O0"], faults))
    jobs += [(path, op_flags, None) for path in ops.values()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: _compile(*job), jobs))


def _showing(header: str, ops: Mapping[str, Path]) -> list[str]:
    """Whose kernels show a fault in `header`: sources of its op; what all ops share is shown by logprob."""
    folder = header.partition("/")[0]
    of_op = [name for name in ops if name == folder or name.startswith(f"{folder}_")]
    return [name for name in of_op if header in _reached(ops[name])] or ["logprob"]


def _reached(source: Path) -> set[str]:
    """The headers that a source includes, and those that they include."""
    found: set[str] = set()
    texts = [path.read_text() for path in _sources(source)]
    for text in texts:
        new = set(re.findall(r'#include "rlkernel/(.+)"', text)) - found
        found |= new
        texts += [(CSRC / "include/rlkernel" / name).read_text() for name in sorted(new)]
    return found


def _compile(source: Path, flags: list[str], faults: Faults | None) -> Path:
    include, emulation = CSRC / "include", CSRC / "emulation"
    headers = sorted(p for folder in (include, emulation) for p in folder.rglob("*.*h"))
    command = [CXX, *FLAGS, *flags, "-c", str(source), f"-I{emulation}"]
    key = [*command, *(f"{p}\n{p.read_text()}" for p in [*_sources(source), *headers]), repr(faults)]

    def build(folder: Path, target: Path) -> list[str]:
        found = _with_faults(faults, folder / "include") if faults else include
        return [*command, f"-I{found}", "-o", str(target)]

    return _kept(f"{source.stem}.o", key, build)


def _with_faults(faults: Faults, folder: Path) -> Path:
    """A copy of the headers in `folder`."""
    shutil.copytree(CSRC / "include", folder)
    for header, (original, replacement) in faults.items():
        path = folder / "rlkernel" / header
        content = path.read_text()
        assert content.count(original) == 1, f"{header} must hold {original!r} once, to plant a fault there"
        path.write_text(content.replace(original, replacement))
    return folder


def _sources(source: Path) -> list[Path]:
    """HIP's sources include CUDA's."""
    return [source, CSRC / "cuda" / f"{source.stem}.cu"] if source.suffix == ".hip" else [source]


def _link(objects: list[Path], name: str, flags: list[str]) -> Path:
    command = [CXX, *flags, *map(str, objects)]
    return _kept(name, command, lambda folder, target: [*command, "-o", str(target)])


def _kept(name: str, key: list[str], build: Callable[[Path, Path], list[str]]) -> Path:
    """build/emulation/<hash of key>/name; the command that `build` returns makes it where there is none."""
    digest = hashlib.sha256("\0".join([sys.version, *key]).encode()).hexdigest()[:16]
    folder = ROOT / "build/emulation" / digest
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the test workers that want the same build, one makes it
        if not target.exists():
            scratch = folder / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            built = subprocess.run(build(scratch, scratch / name), capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            os.replace(scratch / name, target)
            shutil.rmtree(scratch)
    return target
