"""What SGLang wants of the environment on a CPU: imported before it, and inherited by its processes.

They find rlkernel's entry point beside the tests, whatever rlkernel is installed from.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")

GROUP = "sglang.srt.plugins"
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
INSTALLED = tempfile.TemporaryDirectory()


def _install():
    folder = Path(INSTALLED.name) / "rlkernel_of_this_tree-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: rlkernel-of-this-tree\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in POINTS.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


_install()
sys.path.insert(0, INSTALLED.name)
inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang would compile for longer than the tests run
    "PYTHONPATH": os.pathsep.join([INSTALLED.name, str(ROOT), *filter(None, inherited)]),
}
for name in (
    "SGLANG_RLKERNEL",
    "SGLANG_RLKERNEL_STRICT",
    "SGLANG_RLKERNEL_BATCH_INVARIANT",
    "SGLANG_PLUGINS",
):
    os.environ.pop(name, None)
