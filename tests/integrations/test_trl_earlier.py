"""rlkernel.patch_trl() under TRL from before 1.15, which makes logits: the tests of in_earlier_trl/, once for
each version whose trainers differ.  1.9 is the one that axolotl pins."""

import os
import re
import subprocess
import sys
from pathlib import Path

import peer_sources
import pytest
from fetch_peers import EARLIER_TRL

FOLDER = Path(__file__).parent / "in_earlier_trl"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", EARLIER_TRL)
def test_under_trl(version, tmp_path):
    trl = peer_sources.folder(f"trl-{version}")
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--basetemp={tmp_path / 'tests'}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(trl), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 15 and "skipped" not in done.stdout
