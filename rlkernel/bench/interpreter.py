"""Parity of the Triton kernels where there is no GPU: in Triton's interpreter, on the smallest case, in fp32:
the interpreter multiplies the bits of bf16 as if they were integers.

An environment variable chooses it before Triton is imported, so it takes a process of its own.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from types import ModuleType

from rlkernel import dispatch
from rlkernel.bench.run import Row, Settings

BACKEND = "triton"
PRESET = "tiny"
STEP = "parity of the Triton kernels in the interpreter, on a tiny case"
_LIMIT = 300


def works() -> bool:
    """Whether there is a Triton that interprets these kernels: 3.6 fails on scalars with NumPy 2.4."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:3])) >= (3, 7, 1)


def wanted(options: Namespace, settings: Settings, benchmarks: Mapping[str, ModuleType]) -> bool:
    """Whether this run shows what the machine has, on a machine that can only interpret Triton."""
    broad = not (options.backend or options.preset or options.shape) and "parity" in settings.suites
    here = settings.device == "cpu" and "TRITON_INTERPRET" not in os.environ
    return broad and here and works() and bool(ops(benchmarks))


def ops(benchmarks: Mapping[str, ModuleType] | list[str]) -> list[str]:
    """Those that have a Triton kernel."""
    package = dispatch.BACKENDS.get(BACKEND)
    return [op for op in benchmarks if package and importlib.util.find_spec(f"{package}.{op}") is not None]


def rows(names: list[str]) -> list[Row]:
    """The parity rows of every op that has a Triton kernel; says in the row why there are none."""
    command = [sys.executable, "-m", "rlkernel.bench", "parity", "--preset", PRESET, "--dtype", "float32"]
    command += ["--peers", "none", "--op", ",".join(ops(names)), "--backend", BACKEND, "--json", "-"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode == 2 or not done.stdout.strip():
        raise RuntimeError(f"parity in Triton's interpreter did not run:\n{done.stderr}")
    found: list[Row] = json.loads(done.stdout)["rows"]
    return [{**row, "backend": f"{BACKEND} (interpreter)", "preferred": False} for row in found]
