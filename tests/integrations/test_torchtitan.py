"""FusedLoss under the real torchtitan: the tests of in_torchtitan/, in a process that has its files."""

import os
import sys
from pathlib import Path

import peer_sources
import pytest
from fetch_peers import version
from own_process import ROOT, check_folder, run
from torch.distributed import fsdp

if sys.version_info < (3, 11):
    pytest.skip("torchtitan needs Python 3.11", allow_module_level=True)
if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("torchtitan needs a later torch", allow_module_level=True)
for name in ("datasets", "transformers"):
    pytest.importorskip(name, reason="needs torchtitan's dependencies")

FOLDER = Path(__file__).parent / "in_torchtitan"
OF_ITS = ("docstring_parser", "shtab", "spmd_types", "torch_checkpointing", "torchdata", "typeguard", "tyro")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a process that has torchtitan as if it were installed, and the stand-ins."""
    found = tmp_path_factory.mktemp("installed")
    for name in ("torchtitan", *OF_ITS):
        (found / name).symlink_to(peer_sources.folder(name) / name)
    info = found / f"torchtitan-{version('torchtitan')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version('torchtitan')}\n"
    )
    paths = [FOLDER / "stand_ins", found, ROOT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}


def test_under_torchtitan(environment, tmp_path):
    check_folder(FOLDER, environment, tmp_path, more_than=60)


def test_the_doctor(environment):
    done = run(["-m", "rlkernel.doctor", "torchtitan"], environment)
    assert done.returncode == 0 and "torchtitan: applies; torchtitan 0.3.0" in done.stdout
    assert "ChunkedLossWrapper -> rlkernel.integrations.torchtitan.fused_loss.FusedLoss" in done.stdout
