"""rlkernel.patch_trl() under TRL from before 1.15, which makes logits: the tests of in_earlier_trl/, once for
each version whose trainers differ.  1.9 is the one that axolotl pins, and runs on two ranks, too."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import peer_sources
import pytest
import ranks
from fetch_peers import EARLIER_TRL

FOLDER = Path(__file__).parent / "in_earlier_trl"
ROOT = Path(__file__).parents[2]


SHARDED = FOLDER / "test_earlier_sharded.py"


def _passed(version, parent, *selected):
    """How many tests passed under a version of TRL, of which none failed; and what was printed."""
    trl = peer_sources.folder(f"trl-{version}")
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--basetemp={parent / 'tests'}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(trl), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", *options, *map(str, selected)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1]), done.stdout


@pytest.mark.parametrize("version", EARLIER_TRL)
def test_under_trl(version, tmp_path):
    passed, printed = _passed(version, tmp_path, FOLDER, f"--ignore={SHARDED}")
    assert passed > 15 and "skipped" not in printed


@ranks.pytestmark
def test_on_two_ranks(tmp_path):
    """Under the TRL that axolotl pins: DDP, FSDP 2 and, where DeepSpeed is installed, ZeRO-3."""
    passed, printed = _passed("1.9.2", tmp_path, SHARDED)
    missing = importlib.util.find_spec("deepspeed") is None
    assert passed == (1 if missing else 2) and ("skipped" in printed) == missing
