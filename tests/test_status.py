"""The words of the README's status table are true, and a report of a GPU changes them."""

import re
from pathlib import Path

import backends
import emulation
import pytest

from rlkernel import dispatch, native
from rlkernel.bench import cases, parity, readme, report, status
from rlkernel.bench.ledger import Ledger

ROOT = Path(__file__).resolve().parents[1]


class Recorded:
    """A module of kernels that writes down which ones are called."""

    def __init__(self, module, names):
        self.module, self.names = module, names

    def __getattr__(self, name):
        kernel = getattr(self.module, name)
        if not callable(kernel):
            return kernel
        return lambda *arguments, **fields: self.names.add(name) or kernel(*arguments, **fields)


def run(op, backend):
    """The op forward and backward on the smallest case of its benchmark."""
    module = cases.modules([op])[op]
    case = module.PRESETS["tiny"][0].replace(op=op)
    case = case.replace(gradients=case.gradients or module.GRADIENTS)
    inputs = parity.make_inputs(module, case, "cpu")
    upstream = parity.upstream(module, case, inputs)
    got = parity.outcome(parity.ours(module, op, backend), inputs, case, upstream)
    assert got and all(f"grad_{name}" in got for name in case.gradients)


@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize("op", [op for op in dispatch.ops() if op not in status.CPU_ONLY])
def test_emulated_is_the_source_that_is_compiled(op, warp):
    launched = set()
    with native.emulated(Recorded(emulation.module(warp), launched)):
        run(op, "native")
    sources = {path: path.read_text() for path in (ROOT / "csrc/include/rlkernel").glob("*/*.cuh")}
    for name in launched:
        (path,) = (path for path, text in sources.items() if re.search(rf"^int {name}\(", text, re.MULTILINE))
        stem = path.parent.name
        assert f'#include "rlkernel/{stem}/{path.name}"' in (ROOT / f"csrc/cuda/{stem}.cu").read_text()
        assert f'#include "../cuda/{stem}.cu"' in (ROOT / f"csrc/hip/{stem}.hip").read_text()
    assert launched


@backends.needs_interpreter
@pytest.mark.parametrize("op", [op for op in dispatch.ops() if dispatch.has("triton", op)])
def test_what_is_interpreted_is_compiled_too(op, monkeypatch):
    from triton.runtime import interpreter

    launched, call = set(), interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__",
        lambda self, *args, **kwargs: launched.add(self.fn.__name__) or call(self, *args, **kwargs),
    )  # fmt: skip
    run(op, "triton")
    compiled = Ledger.load().parts["triton"].values()
    assert launched and launched <= {name.rpartition(": ")[2] for kernels in compiled for name in kernels}


def lines_of(text):
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def test_every_op_stands_in_the_table_with_the_backends_that_have_it(tmp_path):
    lines = lines_of(status.table(tmp_path))
    assert [*lines] == dispatch.ops()
    for op, line in lines.items():
        cells = dict(zip(status.COLUMNS, (cell.strip() for cell in line.split("|")[1:]), strict=False))
        assert (cells["Triton"] != "") == dispatch.has("triton", op)
        assert (cells["CPU"] != "") == dispatch.has("native", op)
        assert (cells["CUDA"] != "") == (dispatch.has("native", op) and op not in status.CPU_ONLY)
        assert "run on" not in line
    assert "No GPU has run" in status.line(tmp_path)


@pytest.mark.parametrize("library", status.LIBRARIES)
def test_the_page_of_backends_names_every_op_of_a_library(library):
    own = [path.stem for path in sorted((ROOT / f"rlkernel/{library}").glob("[!_]*.py"))]
    page = (ROOT / "docs/dispatch.md").read_text()
    (named,) = re.findall(rf"^\| `{library}`, `pip .* \| (.*) \|$", page, re.MULTILINE)
    assert own and sorted(re.findall(r"`(\w+)`", named)) == own


@pytest.mark.parametrize(
    "gpu, column", [("NVIDIA H100, sm_90, 80 GiB", 3), ("AMD Instinct MI300X, gfx942, 192 GiB", 4)]
)
def test_what_a_gpu_ran_is_read_from_its_report(tmp_path, gpu, column):
    name = gpu.partition(",")[0]
    rows = [
        {"op": "gae", "backend": "native", "skipped": "", "failures": []},
        {"op": "gae", "backend": "triton", "skipped": "", "failures": ["wrong"]},
        {"op": "whiten", "backend": "native", "skipped": "out of memory", "failures": []},
        {"op": "sampling", "backend": "flashinfer", "skipped": "", "failures": []},
    ]
    head = {"device": "cuda", "machine": {"cpu": "some", "cuda:0": gpu}}
    report.save(str(tmp_path / "2026-01-01-gpu.json"), head, rows)
    report.save(str(tmp_path / "2026-01-02-gpu.json"), head, rows)
    (tmp_path / "2026-01-03-example.json").write_text("{}")
    marked = "".join(f"<!-- bench:begin {n} -->\n<!-- bench:end {n} -->\n" for n in ("status", "status-line"))
    text = readme.fill(marked, tmp_path)
    assert f"**Run on {name}**" in text and readme.fill(text, tmp_path) == text
    lines = lines_of(text)
    assert lines["gae"].split("|")[1 + column].strip() == f"run on {name}; emulated, compiled"
    assert lines["gae"].count(name) == 1 and name not in lines["whiten"]
    assert lines["sampling"].endswith(f"| run on {name} |")
    on_cpu = {"device": "cpu", "machine": {"cpu": "some"}}
    for path in tmp_path.glob("*gpu.json"):
        report.save(str(path), on_cpu, rows)
    without = readme.fill(text, tmp_path)
    assert "No GPU has run" in without and name not in without
