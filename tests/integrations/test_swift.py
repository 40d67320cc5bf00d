"""rlkernel.patch_swift() under the real SWIFT and the TRL that it is made for: the tests of in_swift/, in a
process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import fetch_peers
import peer_sources
import pytest

FOLDER = Path(__file__).parent / "in_swift"
ROOT = Path(__file__).parents[2]


def test_under_swift(tmp_path):
    for name in ("transformers", "peft", "accelerate", "datasets"):
        pytest.importorskip(name, reason="needs SWIFT's dependencies")
    sys.path.insert(0, str(FOLDER))
    try:
        import swift_stand_ins
    finally:
        sys.path.remove(str(FOLDER))
    whole = [f"trl-{fetch_peers.SWIFTS_TRL}", f"ms-swift-{fetch_peers.version('ms-swift')}"]
    stand_ins = swift_stand_ins.write(tmp_path / "stand_ins")
    path = [*map(peer_sources.folder, whole), stand_ins, ROOT]
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--basetemp={tmp_path / 'tests'}"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1", "USE_HF": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "MODELSCOPE_CACHE": str(tmp_path / "cache"), "TOKENIZERS_PARALLELISM": "false", "LOG_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 60 and "skipped" not in done.stdout
