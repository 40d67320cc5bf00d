"""rlkernel.bench as it is run: interrupted and resumed, summed up, on a busy machine, by pytest-benchmark."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from rlkernel.bench import (
    cases,
    cli,
    doctor,
    estimate,
    kept,
    measure,
    options,
    plot,
    render,
    report,
    run,
    summary,
)
from rlkernel.bench.progress import Progress
from rlkernel.benchmarks import _peers

TWO = ["speed", "--op", "logprob", "--shape", "5x33", "--peers", "torch", "--seconds", "0.01"]
TWO += ["--backend", "native,reference", "--device", "cpu"]  # in fp32 and in bf16


class Killed(BaseException):
    """Nothing of the program handles it, as nothing handles SIGKILL."""


@pytest.fixture
def second_case(monkeypatch):
    """What happens where the second case begins; the cases that began."""
    began: list[str] = []

    def planted(happens):
        def one(case, *others):
            began.append(case.dtype)
            if happens is not None and len(began) == 2:
                raise happens
            return run.one(case, *others)

        monkeypatch.setattr(cli, "one", one)
        return began

    return planted


# a run that ends early


def test_a_killed_run_keeps_its_report_and_resume_goes_on(second_case, tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = [*TWO, "--json", str(path)]
    began = second_case(Killed())
    with pytest.raises(Killed):
        cli.main(arguments)
    assert began == ["float32", "bfloat16"]
    first = report.load(path)["rows"]
    assert {row["dtype"] for row in first} == {"float32"} and len(first) == 4

    began.clear()
    second_case(None)
    assert cli.main([*arguments, "--resume"]) == 0
    assert began == ["bfloat16"], "what the report has is not measured again"
    whole = report.load(path)
    assert whole["rows"][:4] == first and [row["dtype"] for row in whole["rows"][4:]] == ["bfloat16"] * 4
    assert len(whole["header"]["took"]) == 2 and "1 case of 2" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp"))

    began.clear()
    assert cli.main([*arguments, "--resume"]) == 0 and not began
    assert "the report is complete" in capsys.readouterr().err
    assert cli.main([*arguments, "--seconds", "0.02", "--resume"]) == 2
    said = capsys.readouterr().err
    assert (
        "--resume must go on with a report of the same settings ({'seconds': 0.01}), got {'seconds': 0.02}"
        in said
    )


def test_ctrl_c_is_no_traceback_where_there_are_no_cases(monkeypatch, capsys):
    def read(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "read", read)
    assert cli.main(["doctor", "--device", "cpu"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "rlkernel.bench: interrupted\n"


def test_a_run_that_names_no_file_keeps_its_report_when_interrupted(
    second_case, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    second_case(KeyboardInterrupt())
    assert cli.main(TWO) == cli.INTERRUPTED
    said = capsys.readouterr()
    assert "interrupted after 1 of 2 cases" in said.err and "--resume goes on" in said.err
    assert "\nsummary\n" in said.out and "bfloat16" not in said.out  # what it has is shown
    path = kept.usual_path(tmp_path)
    assert path == tmp_path / "cache" / "rlkernel" / "bench.json" and str(path) in said.err
    assert len(report.load(path)["rows"]) == 4
    assert cli.main(["show", "--all"]) == 0 and " reference " in capsys.readouterr().out
    assert cli.main(["show"]) == 0 and " reference " not in capsys.readouterr().out
    (tmp_path / "Makefile").touch()
    assert kept.usual_path(tmp_path) == tmp_path / "build" / "bench.json"


def test_cases_of_one_name_are_kept_apart():
    case = cases.Case({"N": 1}, op="logprob")
    assert kept.keys([case, case.replace(dtype="bfloat16"), case]) == [
        "logprob N=1 float32", "logprob N=1 bfloat16", "logprob N=1 float32 (2)",
    ]  # fmt: skip


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    report.write(str(path), "before")
    monkeypatch.setattr(report.Path, "replace", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        report.write(str(path), "after")
    assert path.read_text() == "before"
    report.write("/dev/null", "a device is not replaced")


# the summary


def planted_row(backend, seconds, peers, **other):
    row = {"op": "logprob", "case": "N=4", "dtype": "float32", "pass": "forward", "backend": backend}
    row |= {"axis": None, "skipped": "", "failures": [], "preferred": backend == "native", "error": 1e-6}
    row |= {"torch_error": 2e-6, "peak_extra_bytes": 2**20, "seconds": seconds, "flops": 0, "bytes": 8}
    row |= {"seconds_quartiles": seconds and [0.9 * seconds, 1.1 * seconds], "floor_share": None}
    peer = {"skipped": "", "bare": False, "note": "", "error": 3e-6}
    row["peers"] = {
        name: {**peer, "seconds": time, "peak_extra_bytes": size, "ratio_quartiles": [1.8, 2.4], **more}
        for name, (time, size, more) in peers.items()
    }
    return row | other


PEERS = {
    "torch": (0.004, 3 * 2**20, {}),
    "trl": (0.003, 9 * 2**20, {}),
    "bare": (0.0001, 1, {"bare": True}),
    "gone": (None, None, {"skipped": "not installed"}),
}


def test_the_summary_has_the_numbers_of_the_report():
    rows = [
        planted_row("native", 0.002, PEERS),
        planted_row("reference", 0.001, PEERS),  # an oracle, not what a user gets
        planted_row("triton", 0.0015, PEERS, preferred=False),
        planted_row("triton (interpreter)", None, {}, preferred=False, case="N=3", error=1.0),
        planted_row("native", 0.001, PEERS, failures=["logprobs: wrong"], case="N=5"),
    ]
    table = summary.table(rows)
    (cells,) = (dict(zip(table.columns, line, strict=True)) for line in table.rows)
    assert cells == {
        "op": "logprob", "pass": "fwd", "backend": "triton", "ms": "1.5", "best peer": "trl",
        "peer/ours": "2.00x", "spread": "15%", "MiB": "1.0", "peer MiB": "3.0",
        "error": "1.0e-06", "torch's": "2.0e-06",
    }  # fmt: skip
    notes = "\n".join(table.notes)
    assert "PARITY FAILED: native logprob N=5 float32: logprobs: wrong" in notes
    assert "faster than the best peer in 1 of 1 cases" in notes and "takes by itself: triton" in notes
    slow = {"trl": (0.003, 2**20, {"ratio_quartiles": [0.4, 0.9]})}
    close = {"trl": (0.003, 2**20, {"ratio_quartiles": [0.9, 1.6]})}
    rows = [planted_row("native", 0.006, slow), planted_row("native", 0.002, close, dtype="bfloat16")]
    table = summary.table(rows)
    assert (
        "than the best peer in 0 of 2 cases and passes, slower in 1, within the spread of it in 1"
        in table.notes[0]
    )
    assert table.rows[0][table.columns.index("peer/ours")] == "0.50x-1.50x"
    assert "slower: logprob N=4 float32 forward: 0.50x of trl" in table.notes


def test_a_run_closes_with_the_summary_of_its_report(tmp_path, capsys):
    path, picture = tmp_path / "report.json", tmp_path / "bars.png"
    arguments = [part if part != "speed" else "memory" for part in TWO]
    del arguments[0]  # all suites
    assert cli.main([*arguments, "--dtype", "float32", "--json", str(path), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert " reference " not in out and out.index("\nsummary\n") > out.index("peer columns:")
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = report.load(path)["rows"]
    assert {row["backend"] for row in rows} == {"native", "reference"}
    closing = out[out.index("\nsummary\n") :]
    for row in (row for row in rows if row["backend"] == "native"):
        low, high = row["seconds_quartiles"]
        assert low <= row["seconds"] <= high
        peer = row["peers"]["torch"]
        (line,) = (
            x
            for x in closing.splitlines()
            if re.match(rf"  logprob +{re.escape(summary.PASSES[row['pass']])} ", x)
        )
        for text in (
            render.milliseconds(row["seconds"]),
            f"{peer['seconds'] / row['seconds']:.2f}x",
            render.mib(row["peak_extra_bytes"]),
            render.mib(peer["peak_extra_bytes"]),
            render.scientific(row["error"]),
            render.scientific(row["torch_error"]),
        ):
            assert f" {text} " in f"{line} ", text


def test_quartiles():
    assert measure.quartiles([1.0, 2.0]) is None
    assert measure.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
    assert render.spread([2.0, 4.0], 3.0) == pytest.approx(1 / 3) and render.spread(None, 3.0) is None


def test_bars_are_of_what_ran_beside_a_peer(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    wild = {"sample": (0.004, 2**28, {"ratio_quartiles": [0.01, 99.0]})}
    rows = [planted_row("native", 0.002, PEERS), planted_row("native", 0.004, PEERS, op="gae")]
    rows.append(
        planted_row("native", 0.002, wild, op="prefix_shared_attention", **{"pass": "forward+backward"})
    )
    figure = plot.bars(plot.pyplot(), rows)
    speed, memory = figure.axes
    figure.canvas.draw()  # what is drawn outside of the picture is clipped
    edges = figure.bbox
    for text in [*speed.texts, *memory.texts, *speed.get_yticklabels()]:
        box = text.get_window_extent()
        assert edges.x0 <= box.x0 and box.x1 <= edges.x1, text.get_text()
    for axis in figure.axes:  # and within the panel of its bar
        box = axis.get_window_extent()
        assert all(text.get_window_extent().x1 <= box.x1 + 1 for text in axis.texts)
    assert [text.get_text() for text in speed.texts] == ["1.50x trl", "0.75x trl", "2.00x sample"]
    assert [bar.get_width() for bar in speed.patches] == pytest.approx([0.5, -0.25, 1.0])
    assert len(memory.patches) == 6 and "1 / 3 torch" in memory.texts[0].get_text()
    pyplot.close(figure)
    with pytest.raises(cases.UsageError, match="--plot must have a case that ran beside a peer"):
        plot.save(str(tmp_path / "x.png"), [planted_row("native", 0.002, {})])
    with pytest.raises(cases.UsageError, match="--plot must be a picture"):
        plot.save(str(tmp_path / "x.word"), rows)


# how long it takes


def test_what_is_left_follows_what_was_done():
    now = [0.0]
    remaining = estimate.Remaining({"a": 10.0, "b": 20.0, "c": 30.0}, lambda: now[0])
    assert remaining() == 60
    remaining.begin("a")
    now[0] = 4.0
    assert remaining() == 56
    now[0] = 25.0
    assert remaining() == 50 and remaining.done() == 25.0  # twice as long as was guessed, but for the start
    assert remaining() == 100
    assert [estimate.words(x) for x in (3, 49, 61, 3700)] == ["5 s", "50 s", "2 min", "1 h 2 min"]


def test_progress_says_what_is_left(capsys):
    with Progress(12, remaining=lambda: 75.0) as progress:
        progress.step("one")
    assert capsys.readouterr().err == "[ 1/12] one  (0:00, about 1:15 left)\n"


# a busy machine


def noisy(share):
    """Rounds of which every other one takes that much longer."""
    return [0.002 * (1 + share * (i % 2)) for i in range(20)]


QUIET = {
    "rounds": {"one thread": [0.001, *noisy(0.02)], "2 threads": noisy(0.04)},
    "waited": 0.01,
    "cores": 2,
}
QUIET |= {"others": 0.1, "stolen": 0.0}
BUSY = {
    "times of 2 threads spread by 13%": {"rounds": {"one thread": noisy(0.01), "2 threads": noisy(0.3)}},
    "one thread took 1.30 times a fast": {"rounds": {"one thread": [0.001, 0.001, *([0.0013] * 18)]}},
    "waited for a core 20%": {"waited": 0.2},
    "other processes kept 0.9 of 2 cores busy": {"others": 0.9},
    "the hypervisor took 8%": {"stolen": 0.08},
    "hold 3.0 GiB of this GPU": {"foreign": 3 * 2**30},
}


def test_a_quiet_machine_is_trusted(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "read", lambda device, seconds: doctor.Reading(**QUIET))
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "quiet: times can be trusted" in out and "busy" not in out


@pytest.mark.parametrize("said", BUSY)
def test_a_busy_machine_is_not(said, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "read", lambda device, seconds: doctor.Reading(**{**QUIET, **BUSY[said]}))
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert said in out and out.endswith("too busy to trust times\n") and out.count("busy: ") == 1


def test_a_run_on_a_busy_machine_says_so_in_its_report_and_its_summary(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "read", lambda device, seconds: doctor.Reading(**{**QUIET, "others": 0.9}))
    path = tmp_path / "report.json"
    assert cli.main([*TWO, "--dtype", "float32", "--json", str(path)]) == 0
    said = capsys.readouterr()
    assert "this machine is busy: other processes" in said.err
    assert "busy before the run: other" in said.out and "busy after the run: other" in said.out
    before, after = report.load(path)["header"]["noise"]
    assert before["others"] == after["others"] == 0.9 and before["problems"]


def test_the_doctor_reads_this_machine():
    reading = doctor.read("cpu", 0.01)
    assert all(len(times) >= 10 and min(times) > 0 for times in reading.rounds.values())
    assert reading.cores >= 1 and 0 <= reading.waited <= 1 and reading.foreign is None
    assert doctor.text(reading).splitlines()[-1] in (
        "too busy to trust times", "quiet: times can be trusted",
    )  # fmt: skip


# commands


@pytest.mark.parametrize("command", options.COMMANDS)
def test_every_command_has_its_own_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*([command] if command else []), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert options.COMMANDS[command][0] in out
    assert ("--preset" in out) == (command in (None, *options.MEASURED))
    assert ("--short" in out) == (command == "consistency") and ("--check" in out) == (command == "readme")
    if command is None:
        assert all(f"  {name} " in out for name in options.COMMANDS if name)


def test_a_command_stands_anywhere_among_its_options():
    assert options.split(["--op", "logprob", "speed", "--all"]) == ("speed", ["--op", "logprob", "--all"])
    assert options.split(["--op", "speed"]) == (None, ["--op", "speed"])
    assert options.split(["--op=speed", "parity"]) == ("parity", ["--op=speed"])


# pytest-benchmark


class Watch:
    """pytest-benchmark's fixture, as far as the benchmark files know it."""

    def __init__(self):
        self.extra_info, self.group, self.ran = {}, None, 0

    def __call__(self, call):
        call()
        self.ran += 1


def test_pytest_benchmark_takes_the_gpu_where_there_is_one(monkeypatch):
    """A played one: what is made for it stays on the CPU, and who waits for it is counted."""
    waits, made = [], []
    make = _peers.parity.make_inputs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(
        _peers.parity, "make_inputs", lambda own, case, device: made.append(device) or make(own, case, "cpu")
    )
    case = cases.modules(["logprob"])["logprob"].PRESETS["tiny"][0]
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_peers.parity, "ours", lambda own, op, backend: own._naive)
        _peers.pytest_benchmark(watch, "logprob", case, True, "rlkernel")
    assert made == ["cuda"] and watch.ran == 1 and len(waits) == 2  # to warm up, and when it is timed
    assert watch.extra_info["device"] == "cuda" and watch.extra_info["pass"] == "forward+backward"


def test_pytest_benchmark_writes_its_json(tmp_path):
    pytest.importorskip("pytest_benchmark")
    path = tmp_path / "times.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "rlkernel/benchmarks/gae.py"]
    command += ["-k", "not trl and not verl", "--benchmark-max-time", "0.001", "--benchmark-min-rounds", "1"]
    # beside the workers of xdist nothing is timed, says pytest-benchmark, which knows them by a variable
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    command += ["--benchmark-json", str(path)]
    done = subprocess.run(command, cwd=cli.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["benchmarks"]
    assert len(found) == 2  # without a gradient there is one pass
    for each in found:
        extra = each["extra_info"]
        assert extra["op"] == "gae" and extra["sizes"] == {"B": 32, "L": 512} and each["stats"]["median"] > 0
        assert each["group"] == "gae B=32 L=512 float32 forward"
    assert {each["extra_info"].get("backend") for each in found} == {"native", None}
