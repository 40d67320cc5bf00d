"""Runs each file of tests in a process of its own, several at once; engines of one process share too much.

    python tests/run_files.py --jobs 2 tests/integrations/in_vllm/test_*.py [-- arguments of pytest]

The processes are forks of this one, which has imported what `imported_once.py` beside the files names: the
import of vLLM alone takes longer than many a file. What a file printed is shown whole, once it has ended. The
closing lines are what each took and the counts.
"""

import argparse
import gc
import os
import re
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, NamedTuple

from ports import free_port

NO_TEST = 5  # pytest's status where the arguments leave nothing of a file
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


class Run(NamedTuple):
    file: Path
    began: float
    output: IO[str]


def start(file: Path, arguments: list[str]) -> tuple[int, Run]:
    """The process in which pytest runs a file."""
    output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed once it was read)
    run = Run(file, time.perf_counter(), output)
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process, run
    status = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.environ["MASTER_PORT"] = str(free_port())  # torch's own is one for all, TRL takes it
        import pytest

        status = int(pytest.main([f"--confcutdir={file.parent}", str(file), *arguments]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def import_once(folders: set[Path]) -> None:
    """What stands in the `imported_once.py` of each folder."""
    sys.path[0] = os.getcwd()  # as of `python -m pytest`
    for path in (folder / "imported_once.py" for folder in folders):
        if path.exists():
            runpy.run_path(str(path))
    gc.freeze()  # an engine that starts or ends collects several times, through all that was imported


def starts_processes(file: Path) -> bool:
    """Such files take longest, and go first."""
    return bool(re.search(r"\b(subprocess|Server|worker_processes)\b", file.read_text()))


def counts(output: str) -> dict[str, int]:
    """Of pytest's closing line."""
    lines = output.strip().splitlines()
    return {kind: int(count) for count, kind in COUNT.findall(lines[-1])} if lines else {}


def main() -> int:
    ours, theirs = sys.argv[1:], []
    if "--" in ours:
        cut = ours.index("--")
        ours, theirs = ours[:cut], ours[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(ours)

    total = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}
    took, broken = [], []
    began = time.perf_counter()
    import_once({file.parent for file in options.files})
    imported = time.perf_counter() - began
    waiting, running = sorted(options.files, key=lambda file: not starts_processes(file)), {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            process, run = start(waiting.pop(0), theirs)
            running[process] = run
        process, waited = os.wait()
        status = os.waitstatus_to_exitcode(waited)
        file, began, printed = running.pop(process)
        with printed:
            printed.seek(0)
            output = printed.read()
        print(output, end="" if output.endswith("\n") else "\n", flush=True)
        took.append((time.perf_counter() - began, file))
        for kind, count in counts(output).items():
            total[kind] += count
        if status not in (0, NO_TEST):
            broken.append(f"{file}: pytest ended with status {status}")
    print(f"{imported:>6.0f} s imports")
    print("\n".join(f"{seconds:>6.0f} s {file}" for seconds, file in sorted(took, reverse=True)))
    print("\n".join(broken), end="\n" if broken else "")
    print(f"{total['passed']} passed, {total['failed'] + total['error']} failed, {total['skipped']} skipped")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
