"""CPU seconds of each source of the extension, in minutes: `python .ci/build_seconds.py now --json FILE`.

    before|now       which of the two columns of docs/build.md is measured; the other one stays as FILE has it
    --tree FOLDER    another checkout, such as one of an earlier commit
    --least          a source keeps the least of what FILE has and of this run: a busy machine adds to it
    --only WORDS     sources whose name has one of these, such as cuda; the others keep what FILE has of them

Every command of the build is run alone, one after the other, in a folder that is thrown away.
"""

import argparse
import json
import re
import resource
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parents[1]


def setup_of(tree: Path) -> dict[str, object]:
    """The names of a tree's setup.py, which builds nothing."""
    real, setuptools.setup = setuptools.setup, lambda **settings: None
    try:
        return runpy.run_path(str(tree / "setup.py"), run_name="setup")
    finally:
        setuptools.setup = real


def used() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def measure(tree: Path, only: list[str], kept: dict[str, float]) -> dict[str, float]:
    """Of each source the seconds of all that is compiled from it, or `kept` of those not asked for."""
    setup = setup_of(tree)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        ninja_file = setup["write_ninja"](Path(folder), setup["chosen_parts"](Path(folder)))
        listed = [sys.executable, "-m", "ninja", "-f", str(ninja_file), "-t", "commands"]
        commands = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
        for command in commands:
            source = re.search(r" -c (\S+)", command)
            other = "precompiled headers" if " c++-header " in command else "the link"
            path = Path(source[1]) if source else Path(other)
            for root in (tree / "csrc", Path(folder)):  # of sources, and of what joins several of them
                path = path.relative_to(root) if path.is_relative_to(root) else path
            name = path.as_posix()
            if only and not any(word in name for word in only):
                found |= {name: kept[name]} if name in kept else {}
                continue
            before = used()
            subprocess.run(command, shell=True, check=True)
            found[name] = round(found.get(name, 0.0) + used() - before, 2)
            print(f"{name}: {found[name]:.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("column", choices=("before", "now"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    tree = asked.tree.resolve()
    stored = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    column = stored.setdefault(asked.column, {"cpu_seconds": {}})
    before = column["cpu_seconds"]
    column["cpu_seconds"] = found = measure(tree, asked.only, before)
    if asked.least:
        column["cpu_seconds"] = {
            name: min(seconds, before.get(name, seconds)) for name, seconds in found.items()
        }
    log = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=tree, capture_output=True, text=True)
    column["commit"] = log.stdout.strip()
    least = " --least" if asked.least else ""
    stored["command"] = f"python .ci/build_seconds.py {asked.column}{least} --json FILE"
    asked.json.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
