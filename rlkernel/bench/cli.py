"""Command line of ``python -m rlkernel.bench``."""

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from rlkernel import dispatch
from rlkernel.bench import amx, cases, compare, interpreter, plot, predict, readme, render, report
from rlkernel.bench.cases import UsageError
from rlkernel.bench.consistency import command as consistency
from rlkernel.bench.devices import DEVICES
from rlkernel.bench.progress import Progress
from rlkernel.bench.run import Row, Settings, run, steps

ROOT = Path(__file__).parent.parent.parent
COMMANDS = ("parity", "memory", "speed", "consistency", "compare", "predict", "readme")
QUICK_SECONDS, CAREFUL_SECONDS = 0.2, 5.0
# what `memory` measures when it is not told: the field's table of group sizes, and memory over N
MEMORY_PRESETS = {"cpu": ("group-16", "lengths"), "cuda": ("group-1", "lengths")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 when parity or the gate fails, 2 on bad usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "compare":
            return _compare(options)
        if options.command == "readme":
            return _readme(options)
        if options.command == "predict":
            return _predict(options)
        if options.device in DEVICES:
            raise UsageError(f"--device must be cpu or cuda but for predict, got {options.device}")
        if options.files:
            raise UsageError(
                f"{options.command or 'rlkernel.bench'} must be given no files, got {' '.join(options.files)}"
            )
        if options.command == "consistency":
            return consistency.run(options, arguments)
        if options.short or options.part:
            raise UsageError("--short and --part must be given with the command consistency")
        return _bench(options, arguments)
    except UsageError as error:
        parser.print_usage(sys.stderr)
        print(f"rlkernel.bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlkernel.bench",
        description="Parity, memory and speed of every op on every backend here, beside its peers.",
    )
    add = parser.add_argument
    add(
        "command",
        nargs="?",
        choices=COMMANDS,
        help="one suite, `consistency`, `compare A.json B.json`, `predict`, or `readme`; default: all suites",
    )
    add(
        "files",
        nargs="*",
        help="the two reports of compare; reports of a GPU for predict (those of benchmarks/results); "
        "the files of readme (README.md and docs)",
    )
    add("--op", type=_names, default=(), help="ops, separated by commas; default: all")
    add(
        "--backend",
        type=_names,
        default=(),
        help=f"of {', '.join(dispatch.BACKENDS)}; default: all that can run",
    )
    add("--dtype", type=_names, default=(), help=f"of {', '.join(cases.DTYPES)}")
    add(
        "--preset",
        type=_names,
        default=(),
        help="models (llama-3-8b, qwen3-8b, ...) or cases by name; a wrong one lists all",
    )
    add("--shape", help="sizes as N=512,V=32000 or 512x32000; with --preset, those that differ from it")
    add("--peers", type=_names, default=None, help="names, `all` (also those slow to start) or `none`")
    add(
        "--device",
        choices=("cpu", "cuda", *DEVICES),
        help="default: cuda where there is one; consistency: cpu; predict: the name of a GPU",
    )
    add(
        "--threads",
        type=int,
        default=None,
        help="CPU threads; default: all cores that torch uses, for consistency 1",
    )
    add("--seconds", type=float, default=None, help="time spent on the rounds of one pass")
    add("--json", metavar="FILE", help="write the report; - is standard output, without tables")
    add("--markdown", metavar="FILE", help="write the tables; - is standard output")
    add("--plot", metavar="FILE.png", help="draw peak extra memory over the series of `memory`")
    add(
        "--gate",
        type=float,
        metavar="RATIO",
        help="exit with 1 unless every peer takes RATIO times as long as we do",
    )
    add("--short", action="store_true", help="consistency: tiny models and few pairs, as in CI")
    add(
        "--part",
        type=_names,
        default=(),
        help=f"consistency: of {', '.join(consistency.PARTS)}; default: all that can run",
    )
    add(
        "--check",
        action="store_true",
        help="readme: exit with 1 instead of writing when the tables are not up to date",
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    if options.threads is not None:
        if options.threads < 1:
            raise UsageError(f"--threads must be >= 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    try:
        return _measure(options, arguments)
    finally:
        torch.set_num_threads(threads)


def _measure(options: argparse.Namespace, arguments: list[str]) -> int:
    benchmarks = cases.modules(options.op or None)
    _known("--backend", options.backend, dispatch.BACKENDS)
    _known("--dtype", options.dtype, cases.DTYPES)
    peers = {peer.name for module in benchmarks.values() for peer in module.PEERS}
    if options.peers is not None:
        _known("--peers", options.peers, [*sorted(peers), "all", "none"])
    chosen = _cases(options, benchmarks)
    careful = bool(options.command or options.preset or options.shape)
    settings = Settings(
        suites=(options.command,) if options.command else cases.SUITES,
        device=options.device,
        backends=options.backend,
        peers=options.peers,
        seconds=options.seconds or (CAREFUL_SECONDS if careful else QUICK_SECONDS),
        thorough=careful,
    )
    chosen = [case for case in chosen if set(case.suites) & set(settings.suites)]
    if not chosen:
        raise UsageError(
            f"--preset must have a case for {', '.join(settings.suites)}, got {', '.join(options.preset)}"
        )
    if options.gate is not None and not any(
        "speed" in set(case.suites) & set(settings.suites) for case in chosen
    ):
        raise UsageError(f"--gate must have times to judge, got {options.command}: run `speed`")
    if options.plot and not any(case.axis and "memory" in settings.suites for case in chosen):
        raise UsageError("--plot must have a memory series to draw, got none: run `memory`")
    if options.device == "cpu":
        amx.avoid_broken_amx()
    interpreted = interpreter.wanted(options, settings, benchmarks)
    with Progress(steps(chosen, settings) + interpreted) as progress:
        rows = run(chosen, benchmarks, settings, progress)
        if interpreted:
            progress.step("parity of the Triton kernels in the interpreter, on a tiny case")
            rows += interpreter.rows(list(benchmarks))
    if options.backend and all(row["skipped"] for row in rows):
        reasons = sorted({f"{row['backend']}: {row['skipped']}" for row in rows})
        raise UsageError("--backend must be able to run a case here, got " + "; ".join(reasons))
    return _report(options, arguments, rows)


def _cases(options: argparse.Namespace, benchmarks: dict[str, ModuleType]) -> list[cases.Case]:
    def select(preset: str | None) -> list[cases.Case]:
        return cases.select(benchmarks, preset, options.shape, options.dtype, options.device)

    if options.command == "memory" and not options.preset and not options.shape:
        own = cases.presets(benchmarks)
        larger = [case for name in MEMORY_PRESETS[options.device] if name in own for case in select(name)]
        return [case for case in select(None) if case.axis is None or not larger] + larger
    return [case for preset in options.preset or (None,) for case in select(preset)]


def _known(option: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{option} must be of {', '.join(known)}, got {name}")


def _report(options: argparse.Namespace, arguments: list[str], rows: list[Row]) -> int:
    head = report.header(arguments, options.device)
    if options.json:
        report.save(options.json, head, rows)
    if options.markdown:
        report.write(options.markdown, render.markdown(rows, head))
    if options.plot:
        plot.save(options.plot, rows)
    if "-" not in (options.json, options.markdown):
        render.show(rows, head, sys.stdout)
    failures = [
        f"parity: {r['backend']} {r['op']} {r['case']} {r['dtype']}: {f}" for r in rows for f in r["failures"]
    ]
    return _fail(failures + ([] if options.gate is None else _gate(rows, options.gate)))


def _fail(failures: list[str]) -> int:
    for failure in failures:
        print(f"rlkernel.bench: {failure}", file=sys.stderr)
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


def _compare(options: argparse.Namespace) -> int:
    if len(options.files) != 2:
        raise UsageError(f"compare must be given two reports, got {len(options.files)}")
    before, after = (report.load(path) for path in options.files)
    sys.stdout.write(compare.compare(before, after).text())
    slower = [] if options.gate is None else compare.slower(before, after, options.gate)
    return _fail([f"gate: {row}, not {options.gate:g}x" for row in slower])


def _predict(options: argparse.Namespace) -> int:
    if options.device not in DEVICES:
        raise UsageError(f"predict must be given --device of {', '.join(DEVICES)}, got {options.device}")
    report.write(options.markdown or "-", predict.text(options.device, options.files))
    return 0


def _readme(options: argparse.Namespace) -> int:
    stale = []
    for path in map(Path, options.files) if options.files else readme.pages(ROOT):
        if not path.is_file():
            raise UsageError(f"readme must be given a file that is there, got {os.fspath(path)}")
        before = path.read_text()
        after = readme.fill(before, ROOT / "benchmarks" / "results")
        if before != after and options.check:
            stale.append(f"the tables of {path.name} are not up to date: run make readme-tables")
        elif before != after:
            path.write_text(after)
    return _fail(stale)
