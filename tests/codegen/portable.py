"""The Triton kernels, compiled ahead for every target, once for `make check-codegen` and `make test`.

What `tests/triton_aot.py` reports is kept in build/codegen under a name that sources and versions give it.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlkernel.bench.ledger import Part, Record

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("sm_80", "sm_90", "sm_100", "gfx942")  # in the ledger
TARGETS = (*KEPT, "gfx950")  # of which the kernels of tiles alone are compiled
TRITON = (3, 7)  # whose code the ledger has
# bytes that Triton 3.9 spills beyond eight registers, which 3.6 does not fit either
NEWER_SPILLS = {
    ("sm_80", "finish_kernel"): 104,
    ("sm_100", "draw_kernel"): 416,
    ("sm_100", "product_kernel"): 48,
    ("gfx950", "attention_forward_kernel"): 36,
}
_ASIDE = {"bench", "benchmarks", "consistency", "integrations", "reference"}
Report = dict[str, Any]


def reports(kept: Path = ROOT / "build/codegen") -> dict[str, Report]:
    """What compiling says, for each target; whoever comes second waits for the first and reads it.

    Raises RuntimeError with the compiler's words.
    """
    kept.mkdir(parents=True, exist_ok=True)
    with open(kept / "triton.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = kept / f"triton-{_digest()}.json"
        if not path.exists():
            with ThreadPoolExecutor(2) as pool:
                found = dict(zip(TARGETS, pool.map(_compile, TARGETS), strict=True))
            for older in kept.glob("triton-*.json"):
                older.unlink()
            path.write_text(json.dumps(found))
    stored: dict[str, Report] = json.loads(path.read_text())
    return stored


def version() -> str:
    return f"triton {importlib.metadata.version('triton')}"


def spills(found: dict[str, Report]) -> list[str]:
    """The kernels that do not hold their values in registers: none with the Triton of the ledger."""
    release = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    few = 0 if release == TRITON else 32
    known = NEWER_SPILLS if release > TRITON else {}
    return [
        f"{kernel} spills {used['spilled']} bytes on {target} ({case})"
        for target, report in found.items()
        for case, kernels in report["cases"].items()
        for kernel, used in kernels.items()
        if used["spilled"] > known.get((target, kernel), few)
    ]


def records(found: dict[str, Report]) -> Part:
    """What the ledger keeps of reports: a kernel is called by its case and its name."""
    return {
        target: {
            f"{case}: {kernel}": Record(
                used["registers"], used["shared"], used["spilled"], **report["counts"][case][kernel]
            )
            for case, kernels in report["cases"].items()
            for kernel, used in kernels.items()
        }
        for target, report in found.items()
        if target in KEPT
    }


def _digest() -> str:
    """Of all that what is compiled may follow from; what only measures or patches is left out."""
    said = hashlib.sha256(f"{platform.python_version()} {version()}".encode())
    said.update(importlib.metadata.version("torch").encode())
    package = [p for p in (ROOT / "rlkernel").rglob("*.py") if not {*p.parts} & _ASIDE]
    folders = ("triton_ops", "tests/aot_cases", "tests/codegen")
    own = [p for f in folders for p in (ROOT / f).rglob("*.py")]
    sources = [ROOT / "tests/triton_aot.py", *package, *own]
    for path in sorted(sources):
        said.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return said.hexdigest()[:16]


def _compile(target: str) -> Report:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the targets are named, whatever GPU is here
    command = [sys.executable, str(ROOT / "tests/triton_aot.py"), target]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    report: Report = json.loads(done.stdout)
    return report
