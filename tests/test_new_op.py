"""A new op, end to end: the files and lines that CONTRIBUTING names are all that it takes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import layout
import layout_files
import layout_pages
import pytest

from rlkernel import dispatch

ROOT = Path(__file__).parent.parent

FILES = {
    "rlkernel/calls/scale.py": '''"""What a backend is asked for ``scale``, and what it answers."""
from typing import NamedTuple
from torch import Tensor

class ScaleCall(NamedTuple):
    x: Tensor
    factor: float

class ScaleResults(NamedTuple):
    scaled: Tensor
''',
    "rlkernel/reference/scale.py": '''"""What ``scale`` means."""
from typing import Any
import torch
from torch import Tensor
from rlkernel.calls.scale import ScaleCall, ScaleResults

def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return []

def forward(call: ScaleCall) -> ScaleResults:
    return ScaleResults(call.x * call.factor)

def backward(call: ScaleCall, results: ScaleResults, grads: tuple[Tensor | None, ...]) -> tuple[Tensor]:
    return (grads[0] * call.factor,)

def make_inputs(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n)}
''',
    "rlkernel/ops/scale.py": '''"""Scale."""
import torch
from torch import Tensor
from rlkernel import dispatch
from rlkernel.calls.scale import ScaleCall, ScaleResults
from rlkernel.opaque import Op

def scale(x: Tensor, factor: float) -> Tensor:
    """``x`` times ``factor``."""
    return op(ScaleCall(x, factor))[0]

op = Op(
    "scale", ScaleCall, ScaleResults, outputs=1, gradients=("x",), differentiable=("scaled",), saves=("x",),
    pick=lambda call: dispatch.pick("scale", call.x),
    forward=lambda impl, call: impl.forward(call),
    backward=lambda impl, call, results, grads: impl.backward(call, results, grads),
    like=lambda call: ScaleResults(torch.empty_like(call.x)),
)
''',
    "tests/test_scale.py": "",
    "benchmarks/scale.py": '"""``scale``."""\n',
    "docs/ops/scale.md": "# scale\n",
}
# one line each: where it goes, and what it is
LINES = (
    ("rlkernel/__init__.py", "from rlkernel.ops.whiten import", "from rlkernel.ops.scale import scale\n"),
    ("rlkernel/__init__.py", '    "score_tokens",', '    "scale",\n'),
    ("docs/index.md", "| [logprob](", "| [scale](ops/scale.md) | | |\n"),
)
USE = """
import torch, rlkernel
from rlkernel.calls.scale import ScaleCall
from rlkernel.ops.scale import op
x = torch.arange(3.0, requires_grad=True)
for run in (rlkernel.scale, torch.compile(rlkernel.scale, fullgraph=True, backend="aot_eager")):
    (grad,) = torch.autograd.grad(run(x, 2.0).sum(), x)
    assert grad.tolist() == [2.0] * 3 and run(x, 2.0).tolist() == [0.0, 2.0, 4.0]
torch.library.opcheck(op.node, op.flat(ScaleCall(x, 2.0)))
assert rlkernel.explain("scale", x)["reference"] == [] and rlkernel.last_backend("scale") == "reference"
with rlkernel.use_backend("reference"):
    rlkernel.scale(x, 2.0)
"""


@pytest.fixture
def house(tmp_path):
    """A copy of this one with the new op in it."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in ("rlkernel", "csrc", "docs", "tests", *layout_files.LINKS):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=unwanted)
    for name in ("README.md", "CONTRIBUTING.md", "Makefile", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name, before, line in LINES:
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1
        (tmp_path / name).write_text(text.replace(before, line + before))
    return tmp_path


def test_it_keeps_the_rules(house):
    backends = (dispatch.BACKENDS,)
    checks = (layout.op_files, layout.op_exports, layout.reference_imports, layout_pages.orphan_pages)
    problems = [x for check in checks for x in check(house)]
    for check in (layout.orphans, layout.signatures, layout.backend_imports):
        problems += check(house, *backends)
    assert problems == []
    assert "scale" in layout.ops(house)
    for name, text in FILES.items():  # no file is one too many
        (house / name).unlink()
        assert name in "".join(layout.op_files(house)) or "scale" not in layout.ops(house), name
        (house / name).write_text(text)


def test_it_runs(house):
    done = subprocess.run([sys.executable, "-c", USE], cwd=house, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_names_them():
    """Eight files and three lines at most, and those that CONTRIBUTING lists."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"^\| `([\w/]+/(?:test_)?policy_loss\.(?:py|md))` \|", page, re.M)
    assert sorted(named) == sorted(name.replace("scale", "policy_loss") for name in FILES)
    assert len(FILES) <= 8 and len(LINES) <= 3
