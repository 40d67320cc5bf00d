"""The tests of a folder, in a process of their own whose path has another framework."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command, environment, folder=ROOT):
    """What ``python`` printed and returned."""
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=900
    )
    print(done.stdout[-8000:], done.stderr[-4000:])
    return done


def check_folder(folder, environment, tmp_path, more_than):
    """All tests of ``folder`` pass, none is skipped, and there are ``more_than`` so many."""
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={folder}", f"--basetemp={tmp_path / 'tests'}"]
    done = run(["-m", "pytest", *options, str(folder)], environment)
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > more_than and "skipped" not in done.stdout
