"""From a wheel to GRPO on a machine with neither compiler nor GPU: `python .ci/clean_machine.py WHEEL ...`.

Runs the commands of docs/build.md, section "From nothing to GRPO", as they stand there, in a new folder
outside of the checkout and with a PATH on which nothing is; only the pattern becomes the wheel: of several
wheels the newest one for this Python, for CPUs if there is one.
--json keeps the seconds of each.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTION = "## From nothing to GRPO"
NAMES = ("CC", "CXX", "CUDA_", "ROCM_", "HIP_", "RLKERNEL_", "PYTHONPATH", "VIRTUAL_ENV")


def commands() -> list[list[str]]:
    """Those of the page, word by word."""
    page = (ROOT / "docs/build.md").read_text().partition(f"\n{SECTION}\n")[2]
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def environment(empty: Path) -> dict[str, str]:
    """Of a machine without tools: where a compiler is looked for, there is nothing."""
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    return kept | {"PATH": str(empty), "CUDA_VISIBLE_DEVICES": ""}


def run(wheel: Path, folder: Path, instead: dict[str, list[str]] | None = None) -> list[dict[str, object]]:
    """Each command and its seconds.

    instead: what takes the place of a command, by a word of it: tests borrow packages that they have.
    """
    python = Path(sys.executable)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    clean = environment(folder / "nothing")
    rows = []
    for words in commands():
        given = words
        for word, other in (instead or {}).items():
            given = other if word in given else given
        given = [str(wheel.resolve()) if word == "rlkernel-*.whl" else word for word in given]
        given[0] = {"python3": str(python)}.get(given[0], str(folder / given[0]))
        started = time.monotonic()
        done = subprocess.run(given, cwd=folder, env=clean, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{shlex.join(words)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        rows.append(
            {
                "command": " ".join(words),
                "seconds": round(time.monotonic() - started, 1),
                "said": done.stdout,
            }
        )
    return rows


def fitting(wheels: list[Path]) -> Path:
    """The one to install: `make wheels` leaves one for every Python, and for CUDA too."""
    tag = f"-cp{sys.version_info.major}{sys.version_info.minor}-"
    found = [wheel for wheel in wheels if tag in wheel.name]
    if not found:
        raise SystemExit(f"clean_machine: there must be a wheel with {tag[1:-1]} in its name, got none")
    return max(found, key=lambda wheel: (not re.search(r"\bcu\d+-", wheel.name), wheel.stat().st_mtime))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    wheel = fitting(asked.wheels)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(wheel, Path(folder))
    for row in rows:
        print(f"{row['seconds']:8.1f} s  {row['command']}")
    print(rows[-1]["said"])
    if asked.json:
        kept = [{"command": row["command"], "seconds": row["seconds"]} for row in rows]
        asked.json.write_text(json.dumps({"wheel": wheel.name, "commands": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
