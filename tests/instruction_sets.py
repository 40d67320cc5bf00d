"""Bits of the CPU kernels on instruction sets narrower than the one that this process runs."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
from bitwise import assert_equal

from rlkernel import native

# What avx512_bf16 adds is used by the matrix product alone, which has a test of its own.
NARROWER = [isa for isa in native.extension().built()["cpu"][:-1] if isa != "avx512"]


def assert_not_seen(tests: ModuleType, isa: str, folder: Path) -> None:
    """``tests.results()``, a list of tensors, has the same bits here and in a process that runs ``isa``."""
    program = f"import sys, torch, {tests.__name__} as here; torch.save(here.results(), sys.argv[1])"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder / "results")],
        env=os.environ | {"RLKERNEL_CPU_ISA": isa, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for i, (got, want) in enumerate(zip(torch.load(folder / "results"), tests.results(), strict=True)):
        assert_equal(f"result {i} on {isa}", got, want)
