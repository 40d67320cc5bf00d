"""axolotl's plugin and rlkernel.patch_axolotl() under the TRL that it pins: the tests of in_axolotl/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import peer_sources
import pytest
from fetch_peers import version

FOLDER = Path(__file__).parent / "in_axolotl"
ROOT = Path(__file__).parents[2]

for name in ("transformers", "peft", "datasets", "accelerate"):
    pytest.importorskip(name, reason="needs axolotl's dependencies")


def environment(parent):
    """Of a process that has axolotl as if it were installed, TRL 1.9 and the stand-ins."""
    found = parent / "installed"
    found.mkdir()
    for name in ("axolotl", "addict"):
        (found / name).symlink_to(peer_sources.folder(name) / name)
    info = found / f"axolotl-{version('axolotl')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: axolotl\nVersion: {version('axolotl')}\n")
    paths = [peer_sources.folder("trl-1.9.2"), FOLDER / "stand_ins", found, ROOT]
    told = {"AXOLOTL_DO_NOT_TRACK": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return {**os.environ, **told, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def test_under_axolotl(tmp_path):
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--basetemp={tmp_path / 'tests'}"]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(
        command, env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 30 and "skipped" not in done.stdout
