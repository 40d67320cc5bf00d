"""Command line of ``python -m rlkernel.bench``: what each command of ``options`` does."""

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlkernel import dispatch, info
from rlkernel.bench import (
    amx,
    cases,
    compare,
    doctor,
    estimate,
    interpreter,
    kept,
    options,
    plot,
    predict,
    readme,
    render,
    report,
    summary,
)
from rlkernel.bench.cases import UsageError
from rlkernel.bench.consistency import command as consistency
from rlkernel.bench.devices import DEVICES
from rlkernel.bench.progress import Progress
from rlkernel.bench.run import Row, Settings, one, steps

ROOT = Path(__file__).parent.parent.parent
QUICK_SECONDS, CAREFUL_SECONDS = 0.2, 5.0
DOCTOR_SECONDS = 0.6  # before and after a run
INTERRUPTED = 130  # the status of a shell whose command Ctrl-C ended
# what `memory` measures when it is not told: the field's table of group sizes, and memory over N
MEMORY_PRESETS = {"cpu": ("group-16", "lengths"), "cuda": ("group-1", "lengths")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 when parity or the gate fails, 2 on bad usage, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given = options.parse(arguments)
        _places(given)
        return _RUN.get(given.command, _bench)(given, arguments)
    except UsageError as error:
        print(f"rlkernel.bench: {error}", file=sys.stderr)
        words = [options.PROGRAM, options.command_of(arguments) or "", "--help"]
        print(f"help: {' '.join(filter(None, words))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # outside of the cases, which keep what they have
        _say("interrupted")
        return INTERRUPTED


def _places(given: argparse.Namespace) -> None:
    """What cannot be written is said before minutes of measuring, and not by a traceback after them."""
    for name in ("json", "markdown", "plot"):
        path = getattr(given, name, None)
        if path in (None, "-"):
            continue
        file = Path(path)
        is_device = file.exists() and not file.is_file()
        if file.is_dir() or not os.access(file if is_device else file.resolve().parent, os.W_OK):
            want = "a file that can be written, in a folder that is there"
            raise UsageError(f"--{name} must be {want}, got {path}")


def _on_device(given: argparse.Namespace) -> int:
    """How many threads torch had; ``given.device`` and the threads are set."""
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device must be one that torch finds here, cpu, got cuda")
    threads = torch.get_num_threads()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    return threads


def _bench(given: argparse.Namespace, arguments: list[str]) -> int:
    threads = _on_device(given)
    try:
        return _measure(given, arguments)
    finally:
        torch.set_num_threads(threads)


def _measure(given: argparse.Namespace, arguments: list[str]) -> int:
    benchmarks = cases.modules(given.op or None)
    _known("--backend", given.backend, dispatch.BACKENDS)
    _known("--dtype", given.dtype, cases.DTYPES)
    peers = {peer.name for module in benchmarks.values() for peer in module.PEERS}
    if given.peers is not None:
        _known("--peers", given.peers, [*sorted(peers), "all", "none"])
    chosen = _cases(given, benchmarks)
    careful = bool(given.command or given.preset or given.shape)
    settings = Settings(
        suites=(given.command,) if given.command else cases.SUITES,
        device=given.device,
        backends=given.backend,
        peers=given.peers,
        seconds=given.seconds or (CAREFUL_SECONDS if careful else QUICK_SECONDS),
        thorough=careful,
    )
    chosen = [case for case in chosen if set(case.suites) & set(settings.suites)]
    if not chosen:
        raise UsageError(
            f"--preset must have a case for {', '.join(settings.suites)}, got {', '.join(given.preset)}"
        )
    if given.gate is not None and not any(
        "speed" in set(case.suites) & set(settings.suites) for case in chosen
    ):
        raise UsageError("--gate must have times to judge, got cases without: run `speed`")
    if given.plot:
        plot.pyplot()  # what is missing is said before anything is measured
    if given.resume and given.json == "-":
        raise UsageError("--resume must have a report that is a file, got --json -")
    if given.device == "cpu":
        amx.avoid_broken_amx()
    store = _store(given, arguments, settings)
    interpreted = interpreter.wanted(given, settings, benchmarks)
    finished = _run(chosen, benchmarks, settings, store, interpreted)
    rows = store.rows
    if given.backend and rows and all(row["skipped"] for row in rows):
        reasons = sorted({f"{row['backend']}: {row['skipped']}" for row in rows})
        raise UsageError("--backend must be able to run a case here, got " + "; ".join(reasons))
    status = _report(given, store) if rows else 0
    return status if finished else INTERRUPTED


def _store(given: argparse.Namespace, arguments: list[str], settings: Settings) -> kept.Kept:
    """Where the rows are kept from case to case."""
    path = None if given.json == "-" else Path(given.json) if given.json else kept.usual_path(ROOT)
    head = report.header([x for x in arguments if x != "--resume"], given.device)
    asked = ("op", "dtype", "preset", "shape")
    head["settings"] = {
        **{name: _plain(getattr(given, name)) for name in asked},
        **{name: _plain(value) for name, value in vars(settings).items()},
    }
    return kept.Kept(path, head, bool(given.json), given.resume)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _run(
    chosen: Sequence[cases.Case],
    benchmarks: dict[str, ModuleType],
    settings: Settings,
    store: kept.Kept,
    interpreted: bool,
) -> bool:
    """Measure what the store does not have yet; False where Ctrl-C ended it."""
    every = dict(zip(kept.keys(chosen), chosen, strict=True))
    todo = {key: case for key, case in every.items() if key not in store}
    guesses = {key: estimate.of_case(case, benchmarks[case.op], settings) for key, case in todo.items()}
    interpreted = interpreted and interpreter.STEP not in store
    if interpreted:
        guesses[interpreter.STEP] = estimate.INTERPRETED * len(interpreter.ops(benchmarks))
    if not guesses:
        print("rlkernel.bench: the report is complete, nothing is measured again", file=sys.stderr)
        return True
    if todo and (settings.peers is None or set(settings.peers) - {"torch", "none"}):
        guesses[next(iter(todo))] += estimate.START
    remaining = estimate.Remaining(guesses)
    timed = "speed" in settings.suites
    _say_first(len(todo), len(every), remaining(), settings, store)
    if timed:
        _look(store, settings, "before", remaining())
    try:
        with Progress(steps(todo.values(), settings) + interpreted, remaining=remaining) as progress:
            for key, case in todo.items():
                remaining.begin(key)
                rows = one(case, benchmarks[case.op], settings, progress)
                store.add(key, rows, remaining.done())
            if interpreted:
                remaining.begin(interpreter.STEP)
                progress.step(interpreter.STEP)
                rows = interpreter.rows(list(benchmarks))
                store.add(interpreter.STEP, rows, remaining.done())
    except KeyboardInterrupt:
        had = len(every) - sum(key not in store for key in every)
        kept_in = f": the report is in {store.path}, and --resume goes on with it" if store.path else ""
        _say(f"interrupted after {had} of {len(every)} cases{kept_in}")
        return False
    if timed:
        _look(store, settings, "after", remaining.spent)
    return True


def _say(text: str) -> None:
    print(f"rlkernel.bench: {text}", file=sys.stderr, flush=True)


def _say_first(todo: int, every: int, seconds: float, settings: Settings, store: kept.Kept) -> None:
    on = settings.device if settings.device == "cuda" else f"{info.threads()} of a CPU"
    had = f" of {every}, of which the report has the others," if todo < every else ""
    plural = "" if todo == 1 else "s"
    _say(f"{todo} case{plural}{had} on {on}: about {estimate.words(seconds)} where nothing else runs")
    if store.path:
        _say(f"after every case the report is in {store.path}; --resume goes on with it")


def _look(store: kept.Kept, settings: Settings, when: str, seconds: float) -> None:
    """A look at the machine, short beside a run of so many seconds."""
    reading = doctor.read(settings.device, min(DOCTOR_SECONDS, seconds / 20))
    store.noise(when, reading.facts())
    for problem in doctor.problems(reading) if when == "before" else ():
        _say(f"this machine is busy: {problem}")


def _cases(given: argparse.Namespace, benchmarks: dict[str, ModuleType]) -> list[cases.Case]:
    def select(preset: str | None) -> list[cases.Case]:
        return cases.select(benchmarks, preset, given.shape, given.dtype, given.device)

    if given.command == "memory" and not given.preset and not given.shape:
        own = cases.presets(benchmarks)
        larger = [case for name in MEMORY_PRESETS[given.device] if name in own for case in select(name)]
        return [case for case in select(None) if case.axis is None or not larger] + larger
    return [case for preset in given.preset or (None,) for case in select(preset)]


def _known(option: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{option} must be of {', '.join(known)}, got {name}")


def _report(given: argparse.Namespace, store: kept.Kept) -> int:
    if given.json == "-":
        report.save("-", store.head, store.rows)
    _pages(given, store.rows, store.head, quiet="-" in (given.json, given.markdown))
    failures = [
        f"parity: {r['backend']} {r['op']} {r['case']} {r['dtype']}: {f}"
        for r in store.rows
        for f in r["failures"]
    ]
    return _fail(failures + ([] if given.gate is None else _gate(store.rows, given.gate)))


def _pages(given: argparse.Namespace, rows: list[Row], head: dict[str, Any], quiet: bool = False) -> None:
    """The tables, the summary that closes them, and the picture."""
    shown = rows if given.all else summary.without_oracle(rows)
    if not quiet:  # first: a disk that is full takes no picture, and the tables are here all the same
        closing = summary.table(rows)
        for reading in head.get("noise", ()):
            closing.notes += [f"busy {reading['when']} the run: {problem}" for problem in reading["problems"]]
        render.show(shown, head, sys.stdout, [closing] if closing.rows else [])
    if given.markdown:
        try:
            report.write(given.markdown, render.markdown(shown, head))
        except OSError as error:
            raise UsageError(f"--markdown must be a file that can be written, got {error}") from error
    if given.plot:
        plot.save(given.plot, rows, _title(head))


def _title(head: dict[str, Any]) -> str:
    gpu = head["machine"].get("cuda:0") if head["device"] == "cuda" else None
    version = head["commit"] or head["versions"]["rlkernel"]
    return f"{gpu or head['machine']['cpu']}; rlkernel {version}, {head['date']}"


def _fail(failures: list[str]) -> int:
    for failure in failures:
        _say(failure)
    return 1 if failures else 0


def _gate(rows: list[Row], gate: float) -> list[str]:
    """What a user would get, against every rival that ran."""
    timed = [row for row in rows if row["seconds"] and row["preferred"]]
    return [
        f"gate: {row['op']} {row['case']} {row['dtype']} {row['pass']}: "
        f"{name} takes {ratio:.2f}x our time, not {gate:g}x"
        for row in timed
        for name, peer in row["peers"].items()
        if peer["seconds"] and not peer["bare"] and (ratio := peer["seconds"] / row["seconds"]) < gate
    ]


def _show(given: argparse.Namespace, arguments: list[str]) -> int:
    paths = given.files or [kept.usual_path(ROOT)]
    if len(paths) > 1:
        raise UsageError(f"show must be given one report, got {len(paths)}")
    stored = report.load(paths[0])
    if not all({"op", "backend", "pass", "axis"} <= set(row) for row in stored["rows"]) or not stored["rows"]:
        raise UsageError(f"{paths[0]} must be a report of parity, memory or speed with rows, got another")
    _pages(given, stored["rows"], stored["header"], quiet=given.markdown == "-")
    return 0


def _doctor(given: argparse.Namespace, arguments: list[str]) -> int:
    threads = _on_device(given)
    try:
        reading = doctor.read(given.device, given.seconds)
    finally:
        torch.set_num_threads(threads)
    sys.stdout.write(doctor.text(reading))
    return 1 if doctor.problems(reading) else 0


def _compare(given: argparse.Namespace, arguments: list[str]) -> int:
    if len(given.files) != 2:
        raise UsageError(f"compare must be given two reports, got {len(given.files)}")
    before, after = (report.load(path) for path in given.files)
    sys.stdout.write(compare.compare(before, after).text())
    slower = [] if given.gate is None else compare.slower(before, after, given.gate)
    return _fail([f"gate: {row}, not {given.gate:g}x" for row in slower])


def _predict(given: argparse.Namespace, arguments: list[str]) -> int:
    if given.device not in DEVICES:
        raise UsageError(f"predict must be given --device of {', '.join(DEVICES)}, got {given.device}")
    report.write(given.markdown or "-", predict.text(given.device, given.files))
    return 0


def _readme(given: argparse.Namespace, arguments: list[str]) -> int:
    stale = []
    for path in map(Path, given.files) if given.files else readme.pages(ROOT):
        if not path.is_file():
            raise UsageError(f"readme must be given a file that is there, got {os.fspath(path)}")
        before = path.read_text()
        after = readme.fill(before, ROOT / "benchmarks" / "results")
        if before != after and given.check:
            stale.append(f"the tables of {path.name} are not up to date: run make readme-tables")
        elif before != after:
            path.write_text(after)
    return _fail(stale)


_RUN = {
    "show": _show,
    "doctor": _doctor,
    "compare": _compare,
    "predict": _predict,
    "readme": _readme,
    "consistency": consistency.run,
}
