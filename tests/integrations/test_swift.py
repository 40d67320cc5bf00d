"""rlkernel.patch_swift() under the real SWIFT and the TRL that it is made for: the tests of in_swift/, in a
process of their own."""

import os
import sys
from pathlib import Path

import fetch_peers
import peer_sources
import pytest
from own_process import ROOT, check_folder

FOLDER = Path(__file__).parent / "in_swift"


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
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1", "USE_HF": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "MODELSCOPE_CACHE": str(tmp_path / "cache"), "TOKENIZERS_PARALLELISM": "false", "LOG_LEVEL": "ERROR",
    }  # fmt: skip
    check_folder(FOLDER, environment, tmp_path, more_than=60)
