"""axolotl's plugin and rlkernel.patch_axolotl() under the TRL that it pins: the tests of in_axolotl/."""

import os
from pathlib import Path

import peer_sources
import pytest
from fetch_peers import version
from own_process import ROOT, check_folder

FOLDER = Path(__file__).parent / "in_axolotl"

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
    check_folder(FOLDER, environment(tmp_path), tmp_path, more_than=30)
