"""The CPU kernels are compiled once per instruction set: the narrower copies pass the same tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel import native

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_narrower_instruction_sets(isa):
    built = native.extension().built()["cpu"]
    if isa not in built:
        pytest.skip(f"this processor's kernels are {', '.join(built)}")
    chosen = [
        "-k",
        "native-cpu and not huge and not 32_bits",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-q",
    ]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *chosen,
            TESTS / "test_logprob.py",
            TESTS / "test_logprob_bits.py",
            TESTS / "test_logprob_torch.py",
            TESTS / "test_linear_logprob.py",
            TESTS / "test_linear_logprob_workspace.py",
            TESTS / "test_logprob_support.py",
            TESTS / "test_prefix_shared_attention_kernels.py",
        ],
        env=os.environ | {"RLKERNEL_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    passed = int(result.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed > 60, result.stdout[-500:]


def test_unknown_instruction_set_is_named():
    code = "import torch, rlkernel; rlkernel.logprob(torch.zeros(1, 2), torch.tensor([0]))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RLKERNEL_CPU_ISA": "sse9"},
        capture_output=True,
        text=True,
    )
    assert "RLKERNEL_CPU_ISA must be baseline, avx2, avx512 or avx512_bf16, got sse9" in result.stderr
