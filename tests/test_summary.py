"""The counts at the end of ``make test`` are those of the report, and every skip has its reason there."""

import subprocess
import sys
from pathlib import Path

import summary

CASES = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_runs(n): pass

@pytest.mark.parametrize("n", range(4))
def test_needs_a_gpu(n): pytest.skip(f"case {n} needs a GPU")

@pytest.mark.skip
def test_says_nothing(): pass

@pytest.mark.xfail(reason="known fault", strict=True)
def test_known(): assert False

def test_fails(): assert False
"""
WHOLE = """
import pytest
pytest.importorskip("no_such_package", reason="flashinfer is not installed")
"""
PACKAGE = """
import pytest
pytest.skip("Triton's interpreter is not here", allow_module_level=True)
"""


def test_counts_and_reasons(tmp_path):
    for name, text in (("cases", CASES), ("whole", WHOLE), ("package", PACKAGE)):
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=tests.xml"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1
    script = [sys.executable, str(Path(summary.__file__)), str(tmp_path / "tests.xml")]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert run.stdout.splitlines() == [
        "12 tests: 5 ran, 7 were skipped",
        "     7 skipped",
        "     3 passed",
        "     1 expected failure",
        "     1 failure",
        "skipped or expected to fail, because",
        "     4 x case # needs a GPU",
        "     1 x Triton's interpreter is not here",
        "     1 x flashinfer is not installed",
        "     1 x unconditional skip",
        "     1 x known fault",
        "skipped, and nothing on this machine explains it (tests/skips.py)",
        "     4 x case # needs a GPU",
        "     1 x Triton's interpreter is not here",
        "     1 x unconditional skip",
    ]


def test_the_slowest_are_listed(tmp_path):
    times = [0.1, 31.4, 4.9, 7.0] + [6.0] * 40
    cases = "".join(f'<testcase classname="a" name="test_{i}" time="{t}"/>' for i, t in enumerate(times))
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    text, lost = summary.summarise(str(tmp_path / "tests.xml"))
    lines = text.splitlines()
    assert lines[2:5] == [
        "the slowest, of 283 s in all",
        "    31 s a::test_1",
        "     7 s a::test_3",
    ]
    assert len(lines) == 3 + summary.SLOWEST and not lost
