"""rlkernel.bench: what it reports is complete, and it fails when it should."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from backends import needs_interpreter

import rlkernel
from rlkernel import dispatch
from rlkernel.bench import (
    cases,
    cli,
    compare,
    interpreter,
    memory,
    plot,
    readme,
    render,
    report,
    run,
    trainer_step,
)
from rlkernel.bench.cases import Case, Peer
from rlkernel.bench.progress import Progress

TINY = ["--op", "logprob", "--shape", "5x33", "--dtype", "float32", "--peers", "torch", "--seconds", "0.01"]
TINY += ["--backend", "reference", "--device", "cpu"]
ROW = {
    *(
        "op",
        "case",
        "sizes",
        "dtype",
        "device",
        "backend",
        "pass",
        "skipped",
        "failures",
        "peers",
        "preferred",
    ),
    *("error", "torch_error", "errors", "torch_errors", "seconds", "rounds", "bytes", "flops", "floor_share"),
    *("peak_extra_bytes", "peak_resident_bytes", "gradient_bytes", "workspace_bytes", "scale", "axis"),
    *("ratios", "host_seconds", "seconds_quartiles"),
}
HEADER = {"command", "date", "commit", "machine", "device", "threads", "versions", "memory_method"}
HEADER |= {"settings", "took", "noise"}


def series(peaks: dict[int, int], skipped: str = "") -> list[run.Row]:
    """Rows of a memory series as the memory suite makes them, with one peer that takes twice as much."""
    peer = {"seconds": None, "error": None, "errors": {}, "bare": False, "note": ""}
    row = {
        "op": "linear_logprob",
        "dtype": "bfloat16",
        "backend": "native",
        "pass": "forward+backward",
        "scale": 8,
    }
    row |= {"skipped": "", "failures": [], "gradient_bytes": 0, "workspace_bytes": 2**22, "seconds": None}
    return [
        {
            **row,
            "case": f"group {size}",
            "axis": ["group size", size],
            "peak_extra_bytes": peak,
            "peers": {"torch": {**peer, "peak_extra_bytes": 2 * peak, "skipped": skipped}},
        }
        for size, peak in peaks.items()
    ]


@pytest.fixture
def head() -> dict:
    return report.header(["speed"], "cpu")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A backend whose logprobs are wrong in the third digit."""
    package = tmp_path / "planted_backend"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "logprob.py").write_text(
        "from rlkernel.reference import logprob as right\n"
        "from rlkernel.reference.logprob import backward, unsupported\n"
        "def forward(call):\n"
        "    results = right.forward(call)\n"
        "    return results._replace(logprobs=results.logprobs * 1.001)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(dispatch.BACKENDS, "planted", "planted_backend")


# what is reported


def test_peers_run_on_the_same_inputs_and_their_ratio_is_of_the_same_run(monkeypatch, tmp_path):
    module = cases.modules(["logprob"])["logprob"]
    seen: dict[str, set[tuple[int, int]]] = {"ours": set(), "peer": set()}
    original = rlkernel.logprob

    def record(who, inputs):
        if (
            inputs["logits"].dtype == torch.float32 and len(inputs["logits"]) == 5
        ):  # not the probe nor the oracle
            seen[who].add((inputs["logits"].data_ptr(), inputs["target_ids"].data_ptr()))

    def ours(**arguments):
        record("ours", arguments)
        return original(**arguments)

    def rival(inputs, case):
        record("peer", inputs)
        return module._naive(inputs, case)

    monkeypatch.setattr(rlkernel, "logprob", ours)
    monkeypatch.setattr(module, "PEERS", (module.PEERS[0], Peer("rival", lambda: rival)))
    path = tmp_path / "report.json"
    assert cli.main([*TINY, "speed", "--peers", "rival", "--json", str(path)]) == 0
    assert len(seen["ours"]) == 1 and seen["ours"] == seen["peer"]
    for row in report.load(path)["rows"]:
        table = render.tables([row])[0]
        ratio = row["peers"]["rival"]["seconds"] / row["seconds"]
        assert table.rows[0][table.columns.index("rival")] == f"{ratio:.2f}x"


def test_report_is_complete(tmp_path, capsys):
    path, tables = tmp_path / "report.json", tmp_path / "report.md"
    assert cli.main([*TINY, "--json", str(path), "--markdown", str(tables)]) == 0
    stored = json.loads(path.read_text())
    assert set(stored["header"]) == HEADER
    assert [row["pass"] for row in stored["rows"]] == ["forward", "forward+backward"]
    for row in stored["rows"]:
        assert set(row) == ROW
        assert {"seconds", "error", "peak_extra_bytes"} <= set(row["peers"]["torch"])
        assert row["seconds"] > 0 and row["floor_share"] > 0 and row["peak_extra_bytes"] > 0
        assert row["error"] <= 1e-5 and row["torch_error"] <= 1e-5
    assert stored["rows"][0]["bytes"] == 5 * 33 * 4
    printed = capsys.readouterr()
    assert (
        "logprob\n" in printed.out and "N=5 V=33" in printed.out and stored["header"]["commit"] in printed.out
    )
    assert "[1/4]" in printed.err and "[4/4] logprob N=5 V=33" in printed.err  # a pipe gets plain lines
    markdown = tables.read_text()
    assert "| case | dtype | backend |" in markdown and "$ python -m rlkernel.bench --op logprob" in markdown


@pytest.mark.parametrize(
    "suite, absent", [("parity", ["seconds", "peak_extra_bytes"]), ("memory", ["seconds", "error"])]
)
def test_a_suite_measures_only_its_own(tmp_path, suite, absent):
    path = tmp_path / "report.json"
    assert cli.main([*TINY, suite, "--json", str(path)]) == 0
    for row in report.load(path)["rows"]:
        assert all(row[name] is None for name in absent)


def test_reasons_are_given_for_what_did_not_run(monkeypatch, capsys):
    def absent():
        raise ImportError("not installed")

    def unable(inputs, case):
        raise NotImplementedError("it has no such thing")

    def broken(inputs, case):
        raise RuntimeError("out of order")

    module = cases.modules(["logprob"])["logprob"]
    peers = (
        module.PEERS[0],
        Peer("gone", absent),
        Peer("weak", lambda: unable),
        Peer("broken", lambda: broken),
    )
    monkeypatch.setattr(module, "PEERS", peers)
    monkeypatch.setitem(dispatch.BACKENDS, "empty", "json")  # a package without the op's module
    arguments = ["parity", *TINY, "--backend", "reference,empty", "--peers", "all"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    for line in ["gone did not run: not installed", "weak did not run: it has no such thing"]:
        assert line in out
    assert "broken did not run: RuntimeError: out of order" in out
    assert "empty did not run: has no logprob" in out


def test_tables_without_rich(monkeypatch, head, capsys):
    for name in ("rich", "rich.console", "rich.table", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    render.show(series({64: 2**20}), head, sys.stdout)
    assert "rlkernel (native)" in capsys.readouterr().out


def test_tables_with_rich_on_a_terminal(monkeypatch, head, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    render.show(series({64: 2**20}), head, sys.stdout)
    assert "│" in capsys.readouterr().out


def test_progress_with_rich_on_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(2) as progress:
        progress.step("one")
        assert progress._bar is not None
    assert "[1/2]" not in capsys.readouterr().err


def test_memory_table_shows_full_size_and_out_of_memory():
    rows = series({64: 2**30, 256: 2**31}, skipped="out of memory: needs 4.0 GiB, 1.0 GiB are available")
    measured, full = render.tables(rows)
    assert measured.rows[0][:2] == ["rlkernel (native)", "1024 (1024)"]
    assert measured.rows[1] == ["torch", "out of memory (2048)", "out of memory (4096)"]
    assert full.rows[0] == ["rlkernel (native)", "64.0", "128.0: out of memory on a 80 GiB card"]


def test_parity_is_judged_even_where_pytorch_runs_out_of_memory(planted, monkeypatch):
    module = cases.modules(["logprob"])["logprob"]
    case = Case({"N": 512, "V": 128}, suites=("parity",), op="logprob", gradients=("logits",))
    monkeypatch.setattr(memory, "available", lambda device: 4 * 512 * 128 * 4)
    monkeypatch.setattr(
        run._Bench, "_guard", lambda self, c: setattr(c, "skipped", "out of memory" if c.is_peer else "")
    )
    with Progress(2) as progress:
        settings = run.Settings(("parity",), backends=("planted", "reference"), peers=("torch",))
        rows = run.run([case], {"logprob": module}, settings, progress)
    assert rows[0]["peers"]["torch"]["skipped"] and rows[0]["torch_error"]
    assert [bool(row["failures"]) for row in rows] == [True, False, False, False]


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    plot.save(str(path), series({64: 2**30, 128: 2**31}, skipped="out of memory"))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_infinity_becomes_null(tmp_path, head):
    path = tmp_path / "report.json"
    report.save(str(path), head, [{"error": math.inf}])
    assert report.load(path)["rows"] == [{"error": None}]


def test_triton_runs_in_the_interpreter_of_another_process():
    if not interpreter.works():
        pytest.skip("the interpreter needs Triton 3.7.1")
    rows = interpreter.rows(["logprob", "matmul"])  # matmul is also benched in bf16
    assert {row["op"] for row in rows} == {"logprob", "matmul"}
    assert {(row["backend"], row["dtype"]) for row in rows} == {("triton (interpreter)", "float32")}
    assert all(row["error"] is not None and not row["failures"] for row in rows)


# exit codes


def test_a_wrong_backend_fails_parity_and_is_not_timed(planted, tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = [part if part != "reference" else "planted,reference" for part in TINY]
    assert cli.main([*arguments, "--json", str(path)]) == 1
    printed = capsys.readouterr()
    assert (
        "PARITY FAILED: planted" in printed.out and "rlkernel.bench: parity: planted logprob" in printed.err
    )
    rows = {(row["backend"], row["pass"]): row for row in report.load(path)["rows"]}
    assert rows["planted", "forward"]["failures"] and rows["planted", "forward"]["seconds"] is None
    assert not rows["reference", "forward"]["failures"] and rows["reference", "forward"]["seconds"] > 0


@pytest.mark.parametrize("gate, status", [("1e-9", 0), ("1e9", 1)])
def test_gate(gate, status, capsys):
    assert cli.main([*TINY, "speed", "--gate", gate]) == status
    assert ("torch takes" in capsys.readouterr().err) == bool(status)


def test_gate_ignores_bare_gemms_and_backends_that_are_not_preferred():
    row = series({64: 1})[0] | {"seconds": 1.0, "preferred": True}
    slow = {"seconds": 0.5, "bare": False}
    assert cli._gate([row | {"peers": {"rival": slow}}], 1.0)
    assert not cli._gate([row | {"peers": {"bare GEMMs": slow | {"bare": True}}}], 1.0)
    assert not cli._gate([row | {"peers": {"rival": slow}, "preferred": False}], 1.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--op", "policy"], f"--op must be one of {', '.join(dispatch.ops())}"),
        (["--backend", "cuda"], "--backend must be of native, "),
        pytest.param(
            *([*TINY, "--backend", "triton", "--dtype", "float64"], "triton: logits must be"),
            marks=needs_interpreter,
        ),
        (["--dtype", "int8"], "--dtype must be of float32, bfloat16"),
        (["--preset", "llama-9"], "--preset must be one of llama-3-8b"),
        (["--preset", "accuracy", "speed"], "--preset must have a case for speed"),
        (["--shape", "5xV"], "--shape must be like N=512,V=32000"),
        (["--shape", "0x5"], "--shape must be like N=512,V=32000"),
        (["--shape", "Q=5"], "an op must take these sizes"),
        (["--peers", "tlr"], "--peers must be of"),
        (["--threads", "0"], "--threads must be >= 1"),
        (["parity", "--gate", "1"], "alone, got --gate 1"),
        (["--preset", "accuracy", "--gate", "1"], "--gate must have times to judge"),
        (["parity", "--plot", "x.png"], "alone, got --plot x.png"),
        (["speed", "--seconds", "0"], "--seconds must be seconds above 0, got 0"),
        (["speed", "--threads", "two"], "--threads must be >= 1, got two"),
        (["--resume", "--json", "-"], "--resume must have a report that is a file"),
        (["--json", "absent/x.json", *TINY], "in a folder that is there, got absent/x.json"),
        (["--markdown", "absent/x.md", *TINY], "--markdown must be a file that can be written, in a folder"),
        (["--plot", "absent/x.png", *TINY], "--plot must be a file that can be written, in a folder"),
        (["consistency", "--json", "."], "--json must be a file that can be written, in a folder"),
        (["predict", "--device", "h100", "--markdown", "absent/x.md"], "--markdown must be a file"),
        (["faster"], "the command must be of parity, memory, speed, show"),
        (["show", "a.json", "b.json"], "show must be given one report, got 2"),
        (["doctor", "--op", "gae"], "doctor must be given --help, --device, --threads, --seconds alone"),
        (["speed", "a.json"], "speed must be given no files"),
        (["compare", "a.json"], "compare must be given two reports"),
        (["compare", "a.json", "b.json"], "a.json must be a report"),
        (["readme", "absent.md"], "readme must be given a file"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and "None" not in said.err and not said.out
    assert "in a folder" not in message or "about" not in said.err, "said before anything is measured"


def test_a_run_outside_of_a_checkout_states_no_commit():
    head = {"machine": {"cpu": "a", "cpu details": "b"}, "device": "cpu", "versions": {"rlkernel": "0.1"}}
    head |= {"command": "c", "date": "2026-01-01", "commit": None}
    assert render.provenance(head)[1] == "rlkernel 0.1; 2026-01-01"
    assert cli._title(head) == "a; rlkernel 0.1, 2026-01-01"


def test_module_entry():
    command = [sys.executable, "-m", "rlkernel.bench", "faster"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2 and "the command must be of" in done.stderr


# comparing and the README


@pytest.fixture
def reports(tmp_path, head):
    def row(seconds, op="logprob"):
        return {key: "x" for key in compare.KEY} | {"op": op, "seconds": seconds}

    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    report.save(str(paths[0]), {**head, "commit": "aaaa"}, [row(0.002), row(0.1, "gone")])
    report.save(str(paths[1]), {**head, "commit": "bbbb"}, [row(0.001)])
    return [str(path) for path in paths]


@pytest.mark.parametrize("shares, said", [((0.4, 1.0), False), ((0.4, 1.004), False), ((0.4, 1.12), True)])
def test_a_floor_that_was_beaten_is_never_printed_without_a_word(head, shares, said):
    row = series({64: 2**20})[0] | {"axis": None, "seconds": 1.0, "flops": 10, "bytes": 10, "error": None}
    row |= {"torch_error": None, "peers": {}}
    rows = [{**row, "case": f"case {share}", "floor_share": share} for share in shares]
    (table,) = render.tables(rows)
    assert [cells[table.columns.index("floor")] for cells in table.rows] == [
        f"{share:.0%}" for share in shares
    ]
    assert [note.startswith("floor above 100%") for note in table.notes] == [True] * said


def test_no_time_stands_without_a_word_on_its_spread(head):
    row = series({64: 2**20})[0] | {"axis": None, "seconds": 2.0, "flops": 10, "bytes": 10, "error": None}
    row |= {"torch_error": None, "peers": {}, "floor_share": None}
    known, old = ({**row, **more} for more in ({"seconds_quartiles": [1.8, 2.0]}, {}))
    assert "| 5% |" in render.markdown([known, old], head)
    for rows, legend in (([known, old], render.SPREAD_LEGEND), ([old], render.NO_SPREAD_LEGEND)):
        said = [line for line in render.markdown(rows, head).splitlines() if line.startswith("- spread: ")]
        assert said == [f"- {legend}"]
        assert legend in render.text(rows, head)
    assert "spread: " not in render.markdown([old | {"seconds": None}], head)


def test_the_report_of_an_example_says_what_its_steps_lie_between(head):
    ways = {
        mode: {"seconds": [9.0, *steps], "summary": {"seconds": steps[1], "mib": 7.0}}
        for mode, steps in (("stock", (1.0, 2.0, 4.0)), ("ours", (0.5, 1.0, 1.5)))
    }
    stored = {"header": head, **ways}
    rows = trainer_step.measured(stored, ways, {"s": ("seconds", "{:.1f}"), "MiB": ("mib", "{:.0f}")})
    assert rows == [["s", "2.0 (1.0 to 4.0)", "1.0 (0.5 to 1.5)", "2.0x"], ["MiB", "7", "7", "1.0x"]]
    assert "medians of 3 measurements after one" in trainer_step.spread_of(stored, ways)


def test_compare_prints_commits_and_ratios(reports, capsys):
    assert cli.main(["compare", *reports]) == 0
    out = capsys.readouterr().out
    assert "A aaaa" in out and "B bbbb" in out and "2.00x" in out and "only in A: 1 row\n" in out + "\n"


@pytest.mark.parametrize(
    ("names", "differ"), [(("1 threads", "1 thread"), 0), (("1 thread", "11 threads"), 1)]
)
def test_a_machine_is_the_same_under_the_name_that_older_reports_give_it(names, differ, head):
    row = {key: "x" for key in compare.KEY} | {"seconds": 0.1}
    before, after = ({"header": {**head, "machine": {"cpu": f"a, {x}"}}, "rows": [row]} for x in names)
    assert len(compare.compare(before, after).notes) == differ


@pytest.mark.parametrize("order, status", [((0, 1), 0), ((1, 0), 1)])
def test_compare_gate(reports, order, status):
    assert cli.main(["compare", *(reports[i] for i in order), "--gate", "0.9"]) == status


def test_readme_tables(tmp_path, head, monkeypatch, capsys):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for date, peak in (("2026-01-01", 2**20), ("2026-02-01", 2**21)):
        report.save(str(results / f"{date}-cpu-memory.json"), head, series({64: peak}))
    text = "# Title\n<!-- bench:begin cpu-memory -->\nold\n<!-- bench:end cpu-memory -->\ntail\n"
    filled = readme.fill(text, results)
    assert "old" not in filled and filled.startswith("# Title\n") and filled.endswith("tail\n")
    assert "| rlkernel (native) | 2.0 (2.0) |" in filled and head["commit"] in filled  # the newest
    assert readme.fill(filled, results) == filled
    with pytest.raises(cases.UsageError, match="cpu-memory"):
        readme.fill(text.replace("cpu-memory", "other"), results)

    monkeypatch.setattr(cli, "ROOT", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(text)
    assert cli.main(["readme", "--check"]) == 1 and page.read_text() == text
    assert cli.main(["readme"]) == 0 and page.read_text() == filled
    assert cli.main(["readme", "--check"]) == 0


def test_tables_of_docs(tmp_path, monkeypatch, capsys):
    """A figure that somebody has typed over a table of a page is found, and written anew."""
    (tmp_path / "docs" / "integrations").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    root = cli.ROOT
    (tmp_path / "benchmarks" / "results").symlink_to(root / "benchmarks" / "results")
    text = (root / "docs" / "integrations" / "trl.md").read_text()
    page = tmp_path / "docs" / "integrations" / "trl.md"
    stored = json.loads(readme.newest(root / "benchmarks" / "results", "grpo_prefix").read_text())
    seconds = [stored[mode]["summary"]["cpu_seconds"] for mode in ("stock", "packed")]
    ratio = f"{seconds[0] / seconds[1]:.1f}x"
    assert f"| {ratio} |" in text
    page.write_text(text.replace(f"| {ratio} |", "| 99.9x |"))
    (tmp_path / "README.md").write_text("")
    (tmp_path / "docs" / "plain.md").write_text("no table")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert cli.main(["readme", "--check"]) == 1 and "trl.md are not up to date" in capsys.readouterr().err
    assert cli.main(["readme"]) == 0 and page.read_text() == text
    assert cli.main(["readme", "--check"]) == 0
