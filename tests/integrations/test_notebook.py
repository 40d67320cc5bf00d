"""The notebook of examples/: it is one, it runs, and what it tells is so."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_notebook as notebook

pytest.importorskip("trl", reason="TRL is not installed")

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "rlkernel.ipynb"


def test_it_is_a_notebook():
    """What version 4.5 of the format asks for, of cells of text and of code."""
    found = notebook.read(FILE)
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert set(found) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", id) for id in ids)
    for cell in found["cells"]:
        code = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    for number, cell in enumerate(notebook.code(found), 1):
        assert cell["execution_count"] == number and cell["outputs"], (
            "python tests/run_notebook.py ... --write"
        )


def test_it_runs_and_tells_what_is_so(tmp_path):
    kept = tmp_path / "printed.json"
    command = [sys.executable, str(ROOT / "tests/run_notebook.py"), str(FILE), "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    cells, printed = notebook.code(notebook.read(FILE)), json.loads(kept.read_text())
    for cell, text in zip(cells, printed, strict=True):
        if "same everywhere" in cell["metadata"].get("tags", ()):
            assert cell["outputs"] == notebook.outputs(text)
    _, ratios, memory, training = printed
    assert re.search(r"of the kept tokens +1\.0000 +100\.0%", ratios)
    ours, theirs = (float(re.search(rf"by_{name}: (\d+) MiB", memory)[1]) for name in ("rlkernel", "torch"))
    assert ours < theirs / 3
    assert float(memory.split()[-1]) < 1e-5
    first, last = map(
        float, re.search(r"([\d.]+) in the first steps, ([\d.]+) in the last", training).groups()
    )
    assert last > first + 0.1 and training.rstrip().endswith("left to TRL: nothing")
