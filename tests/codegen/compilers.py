"""The device compilers, where they are found or fetched, and what they say about each kernel."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import amdgcn
import sass
from counts import Machine, counted

from rlkernel.bench.ledger import Record

ROOT = Path(__file__).resolve().parents[2]
FETCHED = ROOT / "build/codegen"
FLAGS = ["-O3", "-std=c++17", f"-I{ROOT / 'csrc/include'}"]
# NVIDIA's compiler in pieces: the driver, its headers, its optimiser, the runtime's headers, the C++ library.
NVCC_WHEELS = ROOT / "requirements/nvcc.txt"


class Missing(Exception):
    """Why a compiler cannot be had here."""


@dataclass(frozen=True)
class Kernel:
    symbol: str
    registers: int
    spilled: int
    shared: int
    record: Record | None = None  # where its code could be read

    @property
    def name(self) -> str:
        return _plain(self.symbol)

    def __str__(self) -> str:
        return f"{self.registers} / {self.spilled} / {self.shared}"


@dataclass(frozen=True)
class Compiler:
    path: str
    suffix: str
    archs: tuple[str, ...]
    version: str
    arguments: Callable[[str], list[str]]
    resources: Callable[[str], list[Kernel]]
    machine: Machine
    listings: Callable[[Path, str], dict[str, str]]  # of the kernels in what it compiled, by symbol

    def compile(self, source: Path, arch: str) -> tuple[list[Kernel], list[str]]:
        """The kernels of a source, and what is wrong: a failed compile, or a kernel that spills."""
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder) / "code"
            command = [self.path, *FLAGS, *self.arguments(arch), str(source), "-o", str(code)]
            run = subprocess.run(command, capture_output=True, text=True)
            listings = {} if run.returncode else self.listings(code, arch)
        output = run.stdout + run.stderr
        kernels = [
            _recorded(kernel, counted(self.machine, listings[kernel.symbol]))
            if kernel.symbol in listings
            else kernel
            for kernel in self.resources(output)
        ]
        errors = [f"{k.name} spills {k.spilled} bytes" for k in kernels if k.spilled]
        if run.returncode and not errors:
            lines = [line for line in output.splitlines() if "error" in line] or [output.strip()[-500:]]
            errors = lines[:5]
        return kernels, errors


def _recorded(kernel: Kernel, counts: dict[str, Any]) -> Kernel:
    return replace(kernel, record=Record(kernel.registers, kernel.shared, kernel.spilled, **counts))


def find(part: str) -> Compiler:
    """The compiler of a part. Raises Missing saying why there is none."""
    return _nvcc() if part == "cuda" else _clang()


def _run(command: list[str], **options) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, **options)
    except OSError as error:
        raise Missing(f"{command[0]} cannot be run: {error}") from error
    if run.returncode:
        lines = (run.stderr or run.stdout).strip().splitlines() or ["no message"]
        raise Missing(f"`{' '.join(command[:3])} ...` failed: {lines[-1]}")
    return run.stdout


def _nvcc() -> Compiler:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None or "compute_100" not in _run([nvcc, "--list-gpu-arch"]):
        nvcc = str(_fetch_nvcc())

    def arguments(arch: str) -> list[str]:
        gates = ["-Xptxas", "-v,-warn-spills", "-Werror", "all-warnings"]
        return ["--fmad=false", f"-arch={arch}", "-cubin", *gates]

    version = f"nvcc {_version(nvcc)}"
    archs = ("sm_80", "sm_90a", "sm_100")
    return Compiler(nvcc, "cu", archs, version, arguments, _ptxas_resources, sass.MACHINE, _sass)


def _version(compiler: str) -> str:
    """Of three numbers: what nvcc calls V13.0.88 and clang 19.1.7."""
    found = re.search(r"(?:\bV|version )(\d+\.\d+\.\d+)", _run([compiler, "--version"]))
    return found[1] if found else "of an unknown version"


@functools.cache
def disassembler() -> str | None:
    """nvdisasm: beside nvcc, or Triton's."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")  # not imported: that takes seconds
    if triton is not None and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return shutil.which("nvdisasm", path=os.pathsep.join(folders))


def _sass(cubin: Path, arch: str) -> dict[str, str]:
    tool = disassembler()
    return sass.listings([cubin.read_bytes()], arch, tool)[0] if tool else {}


def _fetch_nvcc() -> Path:
    folder = FETCHED / "nvcc"
    nvcc = folder / "nvidia/cu13/bin/nvcc"
    if not nvcc.exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--disable-pip-version-check"]
        _run([*pip, "--target", str(folder), "-r", str(NVCC_WHEELS)])
    if not nvcc.exists():
        raise Missing(f"the wheels of nvcc hold no {nvcc.relative_to(folder)}")
    return nvcc


def _clang() -> Compiler:
    clang = shutil.which("clang++-19") or _debian_clang()
    headers = FETCHED / "hip"
    if not (headers / "usr/include/hip/hip_runtime.h").exists():
        headers.mkdir(parents=True, exist_ok=True)
        _update_packages()
        _run(["apt-get", "download", "-qq", "libamdhip64-dev"], cwd=headers)
        package = next(headers.glob("libamdhip64-dev*.deb"))
        _run(["dpkg", "-x", package.name, "."], cwd=headers)

    def arguments(arch: str) -> list[str]:
        language = ["-x", "hip", "--cuda-device-only", "-nogpulib", "-ffp-contract=off"]
        include = ["-isystem", str(headers / "usr/include"), f"--rocm-path={headers / 'usr'}"]
        library = ["-include", str(Path(__file__).parent / "device_library.h")]
        gates = ["-S", "-Werror", "-Rpass-analysis=kernel-resource-usage"]
        return [*language, f"--offload-arch={arch}", *include, *library, *gates]

    version = f"clang {_version(clang)}"
    archs = ("gfx90a", "gfx942")
    return Compiler(clang, "hip", archs, version, arguments, _clang_resources, amdgcn.MACHINE, _amdgcn)


def _amdgcn(assembly: Path, arch: str) -> dict[str, str]:
    return amdgcn.listings(assembly.read_text())


def _debian_clang() -> str:
    if os.geteuid() != 0:
        raise Missing("clang++-19 was not found, and only root can install Debian's clang-19")
    _update_packages()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "clang-19"], env=environment)
    return shutil.which("clang++-19") or "clang++-19"


def _update_packages() -> None:
    """Fills the list of Debian's packages, which a fresh machine does not have; only root can."""
    if os.geteuid() == 0:
        _run(["apt-get", "update", "-qq"])


@functools.cache
def _plain(symbol: str) -> str:
    """A kernel's C++ name without its namespaces and arguments."""
    tool = shutil.which("c++filt")
    name = _run([tool, symbol]).strip() if tool else symbol
    name = re.sub(r"\([^()]*\)$", "", name)
    name = re.sub(r"^void |rlkernel::(cuda|hip)::|\(bool\)", "", name)
    return name.replace("true", "1").replace("false", "0")


def _ptxas_resources(output: str) -> list[Kernel]:
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers(?:.*?(\d+) bytes smem)?",
        re.DOTALL,
    )
    blocks = re.split(r"(?=ptxas info +: Compiling entry function)", output)
    kernels = []
    for match in filter(None, map(pattern.search, blocks)):
        symbol, stack, stores, loads, registers, shared = match.groups()
        spilled = max(int(stack), int(stores), int(loads))
        kernels.append(Kernel(symbol, int(registers), spilled, int(shared or 0)))
    return kernels


def _clang_resources(output: str) -> list[Kernel]:
    """Scratch is what lies in memory. Scalar registers kept in lanes of vector registers never get there."""
    kernels = []
    for block in output.split("Function Name: ")[1:]:

        def value(what: str, block: str = block) -> int:
            return int(re.search(rf"{re.escape(what)}: (\d+)", block)[1])  # type: ignore[index]

        spilled = max(value("ScratchSize [bytes/lane]"), value("VGPRs Spill"))
        kernels.append(Kernel(block.split()[0], value("VGPRs"), spilled, value("LDS Size [bytes/block]")))
    return kernels
