"""How long ``make bench`` and ``make test`` take: they note it themselves, and the README states it.

Called by the Makefile, before a command with its name alone, and after it with its times and its status;
``--keep`` makes a report for the README of what was noted in ``build/commands.json``.
"""

import argparse
import datetime
import json
import os
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlkernel.bench import render, report
from rlkernel.bench.cases import UsageError

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {
    "bench": "parity, memory and speed of every op, then GRPO training before and after",
    "test": "every test that this machine can run",
}
COLUMNS = ("command", "its set-up, once", "then", "on")
NEVER = "`make bench` and `make test` note how long they take; no report of it is here yet.\n"
Record = dict[str, Any]


def noted(root: Path = ROOT) -> Path:
    """What the commands took on this machine."""
    return root / "build" / "commands.json"


def kept(results: Path) -> dict[str, Record]:
    """The newest report, by command; empty where there is none."""
    found = sorted(results.glob("????-??-??-commands.json"))
    return _read(found[-1]) if found else {}


def _read(path: Path) -> dict[str, Record]:
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {name: found[name] for name in COMMANDS if name in found}


def note(
    name: str, began: float, ready: float, ended: float, fresh: bool, jobs: int | None, root: Path = ROOT
) -> Record:
    """Write down what one command took, beside what is known of the other.

    ``began`` is when make was called and ``ready`` when all was set up, which counts as set-up only if it was
    ``fresh``: if there was nothing of it before.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: Record = {
        "header": {**report.header((), device), "command": f"make {name}"},
        "seconds": ended - ready,
        "set_up_seconds": ready - began if fresh else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jobs": jobs,
        "tests": _tests(root / "build" / "tests.xml") if name == "test" else None,
    }
    noted(root).parent.mkdir(exist_ok=True)
    report.write(str(noted(root)), json.dumps({**_read(noted(root)), name: record}, indent=1) + "\n")
    return record


def _tests(path: Path) -> int:
    """How many tests ran."""
    suites = ET.parse(path).getroot().iter("testsuite")
    return sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites)


def keep(root: Path = ROOT) -> Path:
    """A report of today for the README; of a command that was not run here, what the newest one says.

    Raises:
        UsageError: neither was run here.
    """
    if not (new := _read(noted(root))):
        raise UsageError(
            f"{noted(root)} must hold what a command took, got none: run make bench or make test"
        )
    results = root / "benchmarks" / "results"
    path = results / f"{datetime.date.today().isoformat()}-commands.json"
    report.write(str(path), json.dumps({**kept(results), **new}, indent=1) + "\n")
    return path


def table(results: Path) -> str:
    """For the README: a line for each command that was timed."""
    records = kept(results)
    if not records:
        return NEVER
    rows = [
        [f"`make {name}`", _set_up(record), _took(name, record), _where(record)]
        for name, record in records.items()
    ]
    return "\n".join(render.markdown_table(COLUMNS, rows)) + "\n"


def _set_up(record: Record) -> str:
    return "was there" if record["set_up_seconds"] is None else words(record["set_up_seconds"])


def _took(name: str, record: Record) -> str:
    tests = f" for {record['tests']:,} tests" if record["tests"] else ""
    return words(record["seconds"]) + tests


def _where(record: Record) -> str:
    head = record["header"]
    machine = head["machine"].get("cuda:0") if head["device"] == "cuda" else head["machine"]["cpu"]
    versions = f"Python {head['versions']['python']}, torch {head['versions'].get('torch', 'unknown')}"
    return f"{machine}, {record['cores']} cores; {versions}; commit {head['commit']}, {head['date']}"


def words(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``27 min``: no more digits than another run would have again."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def before(name: str, root: Path = ROOT) -> str:
    """What there is to say first: how long it took the last time, here or where the README's figure is of."""
    record = _read(noted(root)).get(name) or kept(root / "benchmarks" / "results").get(name)
    if record is None:
        return f"make: {COMMANDS[name]}"
    return f"make: {COMMANDS[name]}; it took {_took(name, record)} on {_where(record)}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser("python -m rlkernel.bench.commands", description=__doc__)
    parser.add_argument("name", nargs="?", choices=COMMANDS)
    parser.add_argument("--began", type=float, metavar="SECONDS", help="when make was called, since 1970")
    parser.add_argument("--ready", type=float, metavar="SECONDS", help="when its set-up was done")
    parser.add_argument("--fresh", action="store_true", help="there was nothing of the set-up before")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at a time")
    parser.add_argument(
        "--status", type=int, default=0, help="of the command: of one that failed nothing is noted"
    )
    parser.add_argument("--keep", action="store_true", help="make a report for the README of what was noted")
    given = parser.parse_args(arguments)
    try:
        if given.keep:
            print(f"make: {keep(root)} is there; make readme-tables writes it into the README")
        elif given.name is None:
            parser.error("a name or --keep must be given")
        elif given.ready is None:
            print(before(given.name, root), flush=True)
        elif given.status == 0:
            began = given.ready if given.began is None else given.began
            record = note(given.name, began, given.ready, time.time(), given.fresh, given.jobs, root)
            print(f"make: make {given.name} took {_took(given.name, record)}, its set-up: {_set_up(record)}")
    except UsageError as error:
        print(f"rlkernel.bench.commands: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
