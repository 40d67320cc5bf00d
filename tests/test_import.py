"""``import rlkernel`` needs torch alone, starts nothing and is quick: every test is a fresh process."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel import dispatch

ROOT = Path(__file__).parent.parent

# What an import must do without. A name in this list cannot be imported in the process under test.
OPTIONAL = (
    "triton",
    "flashinfer",
    "aiter",
    "trl",
    "transformers",
    "vllm",
    "sglang",
    "deepspeed",
    "liger_kernel",
    "verl",
    "openrlhf",
    "skyrl",
    "areal",
    "swift",
    "axolotl",
    "llamafactory",
    "torchtitan",
    "megatron",
)
OPTIONAL += ("rich", "matplotlib", "pandas", "pytest", "ninja", "pybind11")

BLOCK = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition('.')[0] in {OPTIONAL} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run(code, prelude=""):
    command = [sys.executable, "-c", prelude + code]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process


def test_torch_alone_suffices():
    code = """
import torch, rlkernel
logits = torch.randn(3, 7, requires_grad=True)
with rlkernel.use_backend('reference'):
    out = rlkernel.logprob(logits, torch.tensor([0, 6, -100]), return_entropy=True)
    out.logprobs.sum().backward()
want = torch.log_softmax(logits, -1)
torch.testing.assert_close(out.logprobs[:2], want[[0, 1], [0, 6]])
assert logits.grad.isfinite().all()
"""
    run(code, BLOCK)


def test_the_blocker_blocks():
    process = subprocess.run([sys.executable, "-c", BLOCK + "import pytest"], capture_output=True, text=True)
    assert "ModuleNotFoundError: No module named 'pytest'" in process.stderr


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_a_backend_without_its_package_says_so_instead_of_failing(backend):
    code = f"""
import torch, rlkernel
x = torch.randn(3, 7), torch.tensor([0, 1, 2])
reasons = rlkernel.explain('logprob', *x)[{backend!r}]
assert all(isinstance(reason, str) and reason for reason in reasons), reasons
assert {backend!r} != 'triton' or reasons
rlkernel.logprob(*x)
"""
    run(code, BLOCK)


def test_an_import_loads_no_optional_package_and_starts_no_gpu():
    code = """
import sys, json, torch
before = set(sys.modules)
import rlkernel
assert not torch.cuda.is_initialized()
print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))
"""
    loaded = set(json.loads(run(code).stdout))
    # an unrelated module of the standard library may come along; the extension and numpy must not
    assert loaded - set(sys.stdlib_module_names) == {"rlkernel"}


def test_an_import_writes_nothing():
    process = run("import rlkernel", "import torch, warnings; warnings.simplefilter('error')\n")
    assert process.stdout == "" and "rlkernel" not in process.stderr


def test_an_import_costs_less_than_half_of_torchs():
    """In processor time, beside torch's import in the same process: a busy machine slows both."""
    code = """
import sys
sys.dont_write_bytecode = False  # of a package whose bytecode was kept, as an installer keeps it
import time
start = time.process_time()
import torch
between = time.process_time()
import rlkernel
print((time.process_time() - between) / (between - start))
"""
    assert min(float(run(code).stdout) for _ in range(3)) < 0.5


def test_all_is_true():
    code = """
import rlkernel
missing = [name for name in rlkernel.__all__ if not hasattr(rlkernel, name)]
assert not missing, missing
assert sorted(rlkernel.__all__) == list(rlkernel.__all__), 'keep __all__ sorted'
"""
    run(code, BLOCK)
    tree = ast.parse((ROOT / "rlkernel/__init__.py").read_text())
    names = {
        alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    names |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    import rlkernel

    private = {name for name in names if name.startswith("_") and name != "__version__"}
    assert names - private - {"Any", "TYPE_CHECKING"} == set(rlkernel.__all__)


def test_a_package_ships_its_types():
    package = ROOT / "rlkernel"
    assert (package / "py.typed").is_file() and (package / "_C.pyi").is_file()
