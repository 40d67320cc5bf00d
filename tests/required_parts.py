"""The parts of the extension that this machine's compilers can build: ``python tests/required_parts.py``.

CI hands them to ``python -m rlkernel.info --require``. The machine is asked and not setup.py, whose mistake
would excuse itself; the places looked at are those that docs/build.md names.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CLANGS = ("clang++", *(f"clang++-{version}" for version in range(24, 16, -1)))
USUAL = ("/usr/local/cuda/bin", "/opt/rocm/bin")
KERNEL = "#include <hip/hip_runtime.h>\n__global__ void empty() {}\nint main() { empty<<<1, 1>>>(); }\n"


def _find(name: str, *homes: str) -> str | None:
    folders = [f"{os.environ[home]}/bin" for home in homes if os.environ.get(home)]
    packages = [str(folder) for place in sys.path for folder in Path(place).glob("nvidia/cu1?/bin")]
    path = [*folders, os.environ.get("PATH", ""), *packages, *USUAL]
    return shutil.which(name, path=os.pathsep.join(path))


def _builds_hip(clang: str) -> bool:
    """Whether a clang comes with AMD's headers and runtime: most do not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.hip")
        source.write_text(KERNEL)
        command = [
            clang,
            "-x",
            "hip",
            "--offload-arch=gfx90a",
            str(source),
            "-o",
            f"{source}.out",
            "-lamdhip64",
        ]
        return subprocess.run(command, capture_output=True).returncode == 0


def required() -> list[str]:
    parts = ["cpu"]
    if _find("nvcc", "CUDA_HOME", "CUDA_PATH"):
        parts.append("cuda")
    homes = ("ROCM_PATH", "ROCM_HOME", "HIP_PATH")
    clangs = (found for name in CLANGS if (found := _find(name, *homes)))
    if _find("hipcc", *homes) or any(map(_builds_hip, clangs)):
        parts.append("hip")
    return parts


if __name__ == "__main__":
    print(" ".join(required()))
