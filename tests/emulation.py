"""Builds csrc/emulation: the device kernels for the CPU, as a Python module or as a program under sanitizers.

A build is kept in build/emulation under a name made of its sources and flags, so an unchanged one costs nothing.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CXX = os.environ.get("CXX", "g++")
FLAGS = "-std=c++17 -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -DRLKERNEL_EMULATION".split()
SANITIZERS = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all".split()


@cache
def module(warp: int) -> types.ModuleType:
    """The kernels with warps of 32 or 64 threads; `rlkernel.native.emulated(module(64))` runs ops on them."""
    return load(build_module(warp))


def build_module(warp: int, faults: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Compiles the module. `faults` maps a header to (text, replacement), to plant a bug in it."""
    include = f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_path('include')}"
    name = f"emulated{warp}"
    flags = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-DRLKERNEL_MODULE={name}", *include]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return _compile(["module.cpp", "emulation.cpp"], [*flags, f"-DRLKERNEL_WARP={warp}"], name + suffix, faults)


def build_driver(warp: int, faults: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Compiles the stand-alone program that runs the kernels under the address and undefined-behaviour sanitizers."""
    flags = ["-O1", *SANITIZERS, f"-DRLKERNEL_WARP={warp}"]
    return _compile(["driver.cpp", "emulation.cpp"], flags, f"driver{warp}", faults)


def load(path: Path) -> types.ModuleType:
    name = path.name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _compile(
    sources: list[str], flags: list[str], name: str, faults: Mapping[str, tuple[str, str]] | None
) -> Path:
    files = sorted(p for folder in ("include", "emulation") for p in (CSRC / folder).rglob("*") if p.is_file())
    text = [sys.version, CXX, *FLAGS, *flags, *(f"{p}\n{p.read_text()}" for p in files), repr(faults)]
    folder = ROOT / "build/emulation" / hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]
    target = folder / name
    if target.exists():
        return target
    scratch = folder / f"scratch-{os.getpid()}"  # test workers may build the same thing at the same time
    shutil.copytree(CSRC / "include", scratch / "include")
    for header, (original, replacement) in (faults or {}).items():
        path = scratch / "include/rlkernel" / header
        content = path.read_text()
        assert content.count(original) == 1, f"{header} must hold {original!r} once, to plant a fault there"
        path.write_text(content.replace(original, replacement))
    includes = [f"-I{scratch / 'include'}", f"-I{CSRC / 'emulation'}"]
    command = [CXX, *FLAGS, *flags, *includes, *(str(CSRC / "emulation" / source) for source in sources)]
    built = subprocess.run([*command, "-o", str(scratch / name)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    os.replace(scratch / name, target)
    shutil.rmtree(scratch)
    return target
