"""Wheels for every Python of this machine: `make wheels`, or `python .ci/wheels.py`.

    --parts LIST     cpu, or cpu,cuda; may be given several times. Default: cpu, and with CUDA where nvcc is
    --python PATH    may be given several times. Default: every version that pyproject.toml names and that is
                     in /opt/python (a manylinux image), under pyenv, or on PATH
    --out FOLDER     default dist
    --json FILE      what was built, its sizes and seconds: the tables of docs/build.md

Kernels are compiled once, by the first of these builds; each Python adds its own bindings. Every wheel is
audited twice: by auditwheel, and by manylinux.py, which also sees to it that no library is bundled. A wheel
with CUDA has the version of its toolkit in its own: +cu130.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import manylinux
import release

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = f"manylinux_2_28_{platform.machine()}"


def supported_pythons() -> list[str]:
    """The minor versions that pyproject.toml names, such as 3.10."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def pythons() -> list[str]:
    """One interpreter of each supported version that is here with its headers."""
    found = []
    for version in supported_pythons():
        tag = f"cp{version.replace('.', '')}"
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
        places = [
            Path(f"/opt/python/{tag}-{tag}/bin/python"),
            *sorted(pyenv.glob(f"versions/{version}.*/bin/python")),
        ]
        places += [Path(path) for path in [shutil.which(f"python{version}")] if path]
        if chosen := next((str(path) for path in places if _builds_for(path, version)), None):
            found.append(chosen)
    return found


def _builds_for(python: Path, version: str) -> bool:
    code = (
        "import os, sys, sysconfig; import pip; print('%d.%d' % sys.version_info[:2], "
        "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    )
    if not python.exists():
        return False
    run = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return run.stdout.split() == [version, "True"]


def cuda_version() -> str | None:
    """That of the toolkit that setup.py would take, such as 130."""
    homes = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*homes, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    if (nvcc := shutil.which("nvcc", path=path)) is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return f"{found[1]}{found[2]}" if found else None


def version_of(parts: str) -> str:
    """That of a wheel: with the toolkit's where it has CUDA kernels."""
    if "cuda" not in parts.split(","):
        return release.version()
    if (toolkit := cuda_version()) is None:
        raise SystemExit("wheels: nvcc was not found, which a wheel with CUDA kernels needs")
    return release.with_local(release.version(), f"cu{toolkit}")


def newer_than_image() -> bool:
    """Whether this system's C library is newer than that of manylinux_2_28."""
    name, number = platform.libc_ver()
    return name == "glibc" and tuple(map(int, number.split("."))) > manylinux.NEWEST["GLIBC"]


def build(python: str, parts: str, version: str, folder: Path) -> Path:
    """A wheel of this tree, its symbols stripped."""
    flags = ["-Wl,-s"]
    if newer_than_image():
        flags.insert(0, manylinux.stubs(ROOT / "build/manylinux"))
    # a build folder of its own: what an earlier build left in build/lib would be packed too
    settings = folder / "setup.cfg"
    settings.write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
    environment = {
        **os.environ,
        "RLKERNEL_BACKENDS": parts,
        "LDFLAGS": " ".join([*flags, os.environ.get("LDFLAGS", "")]).strip(),
        "DIST_EXTRA_CONFIG": str(settings),
        "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLKERNEL": version,
    }
    command = [
        python,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "-w",
        folder,
        ROOT,
    ]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    (wheel,) = folder.glob("rlkernel-*.whl")
    return wheel


def audited(wheel: Path, out: Path) -> Path:
    """The wheel under the name of its platform, once both audits have passed."""
    tool = [sys.executable, "-m", "auditwheel"]
    with tempfile.TemporaryDirectory() as folder:
        repair = [*tool, "repair", "--plat", PLATFORM, "--only-plat", "-w", folder, str(wheel)]
        beside = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        run = subprocess.run(repair, env=beside, capture_output=True, text=True)  # it looks for patchelf
        if run.returncode:
            raise SystemExit(f"wheels: auditwheel refuses {wheel.name}: {(run.stderr or run.stdout).strip()}")
        (repaired,) = Path(folder).glob("*.whl")
        if texts := manylinux.audit(repaired):
            raise SystemExit(f"wheels: {repaired.name}: " + "; ".join(texts))
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repaired, out / repaired.name)
    return out / repaired.name


# torch.Tensor is asked for its DLPack functions; a stand-in has their version, and none that is called here.
LOADS = """
import ctypes, importlib.util, sys, types
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
table = (ctypes.c_uint64 * 16)(1, *[1] * 15)  # version 1.0, then functions
table[1] = 0
capsule = new(ctypes.addressof(table), b"dlpack_exchange_api", None)
Tensor = type("Tensor", (), {"__dlpack_c_exchange_api__": capsule, "__torch_dispatch__": None})
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].Tensor = Tensor
ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)  # which torch brings
spec = importlib.util.spec_from_file_location("rlkernel._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert sys.argv[2].split(",") == [*module.built()], module.built()
try:
    module.cpu.whiten(x=1)
except TypeError:  # raised in C++
    sys.exit(0)
sys.exit("a wrong argument must be refused")
"""


def check_that_it_loads(python: str, wheel: Path, parts: str) -> None:
    """The extension in the wheel, in its own Python, which may have no torch."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"rlkernel/_C\..*\.so", name))
        subprocess.run([python, "-S", "-c", LOADS, archive.extract(name, folder), parts], check=True)


def seconds() -> float:
    """Of processors, by the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", action="append")
    parser.add_argument("--python", action="append")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for parts in asked.parts or ["cpu", *["cpu,cuda"] * (cuda_version() is not None)]:
        for python in asked.python or pythons():
            started, before = time.monotonic(), seconds()
            with tempfile.TemporaryDirectory() as folder:
                wheel = audited(build(python, parts, version_of(parts), Path(folder)), asked.out)
            check_that_it_loads(python, wheel, parts)
            row = {
                "wheel": wheel.name,
                "parts": parts,
                "bytes": wheel.stat().st_size,
                "cpu_seconds": round(seconds() - before, 1),
                "seconds": round(time.monotonic() - started, 1),
            }
            rows.append(row)
            print(f"{wheel.name}: {row['bytes'] / 1e6:.1f} MB, {row['cpu_seconds']} CPU seconds", flush=True)
    if not rows:
        raise SystemExit(
            f"wheels: no Python of {', '.join(supported_pythons())} with pip and headers was found"
        )
    if asked.json:
        machine = {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "libc": "-".join(platform.libc_ver()),
        }
        asked.json.write_text(
            json.dumps({"command": "make wheels", "machine": machine, "wheels": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
