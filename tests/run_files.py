"""Runs each file of tests in a process of its own, several at once; engines of one process share too much.

    python tests/run_files.py --jobs 2 tests/integrations/in_vllm/test_*.py [-- arguments of pytest]

What a file printed is shown whole, once it has ended. The closing lines are what each took and the counts.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NO_TEST = 5  # pytest's status where the arguments leave nothing of a file
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run(file: Path, arguments: list[str]) -> tuple[Path, int, float, str]:
    command = [sys.executable, "-m", "pytest", f"--confcutdir={file.parent}", str(file), *arguments]
    environment = {**os.environ, "MASTER_PORT": str(free_port())}  # torch's own is one for all, TRL takes it
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return file, done.returncode, time.perf_counter() - start, done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    with ThreadPoolExecutor(options.jobs) as pool:
        for file, status, seconds, output in pool.map(lambda file: run(file, theirs), options.files):
            print(output, end="" if output.endswith("\n") else "\n", flush=True)
            took.append((seconds, file))
            for kind, count in counts(output).items():
                total[kind] += count
            if status not in (0, NO_TEST):
                broken.append(f"{file}: pytest ended with status {status}")
    print("\n".join(f"{seconds:>6.0f} s {file}" for seconds, file in sorted(took, reverse=True)))
    print("\n".join(broken), end="\n" if broken else "")
    print(f"{total['passed']} passed, {total['failed'] + total['error']} failed, {total['skipped']} skipped")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
