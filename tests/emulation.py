"""Builds csrc/emulation: the device kernels for the CPU, as a Python module or as a program under sanitizers.

A build is kept in build/emulation under a name made of its sources and flags: an unchanged one costs nothing.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

import pybind11

from rlkernel import dispatch, native

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CXX = os.environ.get("CXX", "g++")
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
FLAGS = ["-std=c++17", "-ffp-contract=off", *WARNINGS, "-DRLKERNEL_EMULATION"]
SANITIZERS = ["-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
Faults = Mapping[str, tuple[str, str]]  # header: (text that stands there once, replacement)


@cache
def module(warp: int) -> types.ModuleType:
    """The kernels with warps of 32 or 64 threads; `rlkernel.native.emulated(module(64))` runs ops on them."""
    return load(build_module(warp))


def build_module(warp: int, faults: Faults | None = None) -> Path:
    """Compiles the module, with `faults` planted in its headers."""
    name = f"emulated{warp}"
    if faults:  # a name of its own: Python takes two extensions of one name for the same
        name += f"_{hashlib.sha256(repr(faults).encode()).hexdigest()[:8]}"
    include = f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_path('include')}"
    optimize = "-O0" if faults else "-O1"  # what costs least, to compile and to run
    common = [optimize, "-fPIC", "-fvisibility=hidden", *include, f"-DRLKERNEL_WARP={warp}"]
    fibers = _compile(["emulation.cpp"], [*common, "-c"], "emulation.o", None)  # no fault is planted there
    flags = [*common, "-shared", str(fibers), f"-DRLKERNEL_MODULE={name}"]
    if faults:
        flags.append(f"-DRLKERNEL_ONLY_{_op_of(next(iter(faults)))}")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return _compile(["module.cpp"], flags, f"{name}{suffix}", faults)


def _op_of(header: str) -> str:
    """The op whose kernels show a fault in `header`; what all ops share is shown by logprob."""
    stem = header.partition(".")[0]
    ops = [op for op in dispatch.ops() if stem == op or stem.startswith(f"{op}_")]
    return max(ops, key=len, default="logprob").upper()


def build_driver(warp: int, faults: Faults | None = None) -> Path:
    """Compiles the program that runs the kernels under the address and undefined-behaviour sanitizers."""
    flags = ["-O0", *SANITIZERS, f"-DRLKERNEL_WARP={warp}"]
    if faults:
        flags += ["-DRLKERNEL_ONLY_LOGPROB", "-Wno-unused-function"]
    return _compile(["driver.cpp", "emulation.cpp"], flags, f"driver{warp}", faults)


def load(path: Path) -> types.ModuleType:
    name = path.name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    for field in fields(native.Kernels)[1:]:
        if not hasattr(loaded, field.name):
            setattr(loaded, field.name, None)  # of an op that a build with faults leaves out
    return loaded


def _compile(sources: list[str], flags: list[str], name: str, faults: Faults | None) -> Path:
    folders = (CSRC / "include", CSRC / "emulation")
    files = sorted(p for folder in folders for p in folder.rglob("*") if p.is_file())
    text = [sys.version, CXX, *FLAGS, *flags, *(f"{p}\n{p.read_text()}" for p in files), repr(faults)]
    folder = ROOT / "build/emulation" / hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the test workers that want the same build, one makes it
        if not target.exists():
            _compile_into(folder, [CXX, *FLAGS, *flags], sources, name, faults)
    return target


def _compile_into(
    folder: Path, command: list[str], sources: list[str], name: str, faults: Faults | None
) -> None:
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(CSRC / "include", scratch / "include")
    for header, (original, replacement) in (faults or {}).items():
        path = scratch / "include/rlkernel" / header
        content = path.read_text()
        assert content.count(original) == 1, f"{header} must hold {original!r} once, to plant a fault there"
        path.write_text(content.replace(original, replacement))
    includes = [f"-I{scratch / 'include'}", f"-I{CSRC / 'emulation'}"]
    paths = [str(CSRC / "emulation" / source) for source in sources]
    command = [*command, *includes, *paths, "-o", str(scratch / name)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    os.replace(scratch / name, folder / name)
    shutil.rmtree(scratch)
