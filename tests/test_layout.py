"""An op has one name, and that name is its address: every rule, here and on a tree that breaks it."""

import re
import subprocess
import sys
from pathlib import Path

import layout
import layout_code
import layout_files
import layout_pages
import pytest

from rlkernel import dispatch

ROOT = Path(__file__).parent.parent
BACKENDS = {"native": "rlkernel.native", "triton": "rlkernel.triton_ops", "reference": "rlkernel.reference"}

FUNCTIONS = "def unsupported(*t): ...\ndef forward(x, factor=1.0): ...\n"

KERNEL = """
@triton.jit
def _kernel(x, row, C: tl.constexpr, KIND: tl.constexpr):
    if {}:
        tl.store(x + row + 1, 2)
"""

PAGE = """# TRL

```python
import rlkernel
```

## What changes
## What does not
## Versions
## Limits
## Measured
<!-- bench:begin step -->
"""

# A house with one op that keeps every rule; each planted fault changes one file of it.
GOOD = {
    "rlkernel/__init__.py": "from rlkernel.ops.scale import scale\n__all__ = ['scale']\n",
    "rlkernel/ops/scale.py": "def scale(x): ...\n",
    "rlkernel/calls/scale.py": "",
    "rlkernel/reference/scale.py": FUNCTIONS + "def make_inputs(n): ...\n",
    "rlkernel/native/scale.py": FUNCTIONS + "from rlkernel import workspace\n",
    "rlkernel/_C.pyi": "class Kernels:\n    def scale(self, *, x: Tensor) -> None: ...\n",
    "triton_ops/__init__.py": "",
    "triton_ops/scale.py": "def unsupported(*t): ...\ndef forward(x, factor: float = 1.0): ...\n",
    "integrations/__init__.py": "",
    "integrations/_patch.py": "",
    "integrations/trl/__init__.py": "from rlkernel.integrations.trl.head import Head\n",
    "integrations/trl/head.py": "class Head: ...\n",
    "benchmarks/__init__.py": "",
    "benchmarks/scale.py": "",
    "csrc/bindings.cpp": '#include "rlkernel/kernels.h"\n',
    "csrc/include/rlkernel/kernels.h": (
        '#include "rlkernel/scale/bind.h"\n#define RLKERNEL_KERNELS(KERNEL) \\\n  KERNEL(scale)\n'
    ),
    "csrc/include/rlkernel/dtype.h": 'const char* v = std::getenv("RLKERNEL_THREADS");\n',
    "csrc/include/rlkernel/scale/arguments.h": '#include "rlkernel/dtype.h"\n',
    "csrc/include/rlkernel/scale/bind.h": '#include "rlkernel/scale/arguments.h"\n',
    "csrc/cpu/scale/rows.h": '#include "rlkernel/scale/arguments.h"\n',
    "csrc/cpu/scale.cpp": '#include "scale/rows.h"\n',
    "csrc/cuda/scale_sm90.cu": "",
    "tests/test_scale.py": "",
    "tests/integrations/test_trl.py": "",
    "docs/index.md": "[scale](ops/scale.md) [trl](integrations/trl.md)\n",
    "docs/ops/scale.md": "RLKERNEL_THREADS\n",
    "docs/integrations/trl.md": PAGE,
    "README.md": "Run `make test`.\n```bash\nmake test bench\npython -m rlkernel.ops.scale\n```\n",
    "Makefile": "test: build\nbench:\n",
}


@pytest.fixture
def house(tmp_path):
    def build(**changes):
        for name, text in {**GOOD, **changes}.items():
            path = tmp_path / name
            if text is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        for name in layout_files.LINKS:
            (tmp_path / "rlkernel" / name).symlink_to(f"../{name}")
        return tmp_path

    return build


def plant(file, text):
    return {file: text}


RULES = {
    "op_files": (layout.op_files, (), plant("docs/ops/scale.md", None), "scale has no docs/ops/scale.md"),
    "op_exports": (
        layout.op_exports,
        (),
        plant("rlkernel/__init__.py", "__all__ = []"),
        "no name of rlkernel.ops.scale",
    ),
    "orphans": (
        layout.orphans,
        (BACKENDS,),
        plant("csrc/cuda/rotate.cu", ""),
        "csrc/cuda/rotate.* belongs to no op",
    ),
    "orphan_headers": (
        layout.orphan_headers,
        (),
        plant("csrc/include/rlkernel/bind.h", ""),
        "nothing includes csrc/include/rlkernel/bind.h",
    ),
    "headers": (
        layout.headers,
        (),
        plant("csrc/include/rlkernel/scale/helpers.h", ""),
        "scale/helpers.h is none of",
    ),
    "header_directions": (
        layout.header_directions,
        (),
        plant("csrc/include/rlkernel/dtype.h", '#include "rlkernel/scale/arguments.h"\n'),
        "dtype.h, which ops share, includes csrc/include/rlkernel/scale/arguments.h",
    ),
    "torch_headers": (
        layout.torch_headers,
        (),
        plant("csrc/cpu/scale.cpp", "#include <torch/all.h>"),
        "torch header",
    ),
    "signatures": (
        layout.signatures,
        (BACKENDS,),
        plant("triton_ops/scale.py", "def unsupported(*t): ...\ndef forward(x, factor=2.0): ..."),
        "triton's scale.forward must take (x, factor=1.0), got (x, factor=2.0)",
    ),
    "backend_folders": (
        layout.backend_folders,
        (BACKENDS,),
        plant("triton_ops/scale.py", None),
        "backend triton has no",
    ),
    "backend_imports": (
        layout.backend_imports,
        (BACKENDS,),
        plant("triton_ops/scale.py", "def forward():\n    from ..reference import scale"),
        "triton's scale.py imports rlkernel.reference.scale",
    ),
    "reference_imports": (
        layout.reference_imports,
        (),
        plant("rlkernel/reference/scale.py", FUNCTIONS + "from rlkernel.drivers import linear_logprob\n"),
        "the reference's scale.py imports rlkernel.drivers.linear_logprob",
    ),
    "import_circles": (
        layout_code.import_circles,
        (),
        plant("rlkernel/ops/scale.py", "if TYPE_CHECKING:\n    import rlkernel\ndef scale(x): ...\n"),
        "rlkernel -> rlkernel.ops.scale -> rlkernel is a circle",
    ),
    "numbered": (
        layout_code.numbered,
        (),
        plant("triton_ops/scale.py", FUNCTIONS + KERNEL.format("C.term == 3")),
        "scale.py:6 has a number for a name: C.term == 3",
    ),
    "defaults": (
        layout_code.defaults,
        (),
        plant("integrations/trl/head.py", "import torch\nROWS = torch.arange(4)\n"),
        "integrations/trl/head.py:2 has a torch.arange without device=",
    ),
    "links": (
        layout.links,
        (),
        plant("integrations/__init__.py", None),
        "rlkernel/integrations does not resolve",
    ),
    "integration_files": (
        layout.integration_files,
        (),
        plant("docs/integrations/trl.md", None),
        "trl has no docs/integrations/trl.md",
    ),
    "integration_pages": (
        layout_pages.integration_pages,
        (),
        plant("docs/integrations/trl.md", PAGE.replace("## Limits\n", "")),
        "docs/integrations/trl.md has no section 'Limits'",
    ),
    "commands": (layout_pages.commands, (), plant("README.md", "`make tests`"), "make has no target tests"),
    "orphan_pages": (
        layout_pages.orphan_pages,
        (),
        plant("docs/lost.md", ""),
        "no page links to docs/lost.md",
    ),
    "typed_figures": (
        layout_pages.typed_figures,
        (),
        plant("docs/ops/scale.md", "ok\nit is 1.5 times as fast as before"),
        "docs/ops/scale.md:2 has a figure typed by hand: 1.5 times as fast",
    ),
    "environment": (
        layout_pages.environment,
        (),
        plant("docs/lost.md", "RLKERNEL_SPEED"),
        "nothing reads it",
    ),
    "test_modules": (
        layout.test_modules,
        (),
        plant("tests/integrations/test_scale.py", ""),
        "tests/integrations/test_scale.py has the name of a module in a folder above it",
    ),
    "stubs": (
        layout.stubs,
        (),
        plant("rlkernel/_C.pyi", "class Kernels: ...\n"),
        "scale is in only one",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_this_repository_keeps(rule):
    check, arguments, _, _ = RULES[rule]
    assert check(ROOT, *((dispatch.BACKENDS,) if arguments else ())) == []


@pytest.mark.parametrize("rule", RULES)
def test_the_check_can_fail(rule, house):
    check, arguments, fault, message = RULES[rule]
    problems = check(house(**fault), *arguments)
    assert len(problems) == 1 and message in problems[0]


@pytest.mark.parametrize("rule", RULES)
def test_the_check_accepts_a_good_tree(rule, house):
    check, arguments, _, _ = RULES[rule]
    assert check(house(), *arguments) == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import rlkernel.triton_ops.scale", "imports rlkernel.triton_ops.scale"),
        ("from rlkernel import reference", "imports rlkernel.reference"),
        ("def f():\n    from rlkernel.reference import scale", "imports rlkernel.reference.scale"),
    ],
)
def test_every_way_of_importing_is_seen(script, problem, house):
    assert problem in layout.backend_imports(house(**plant("rlkernel/native/scale.py", script)), BACKENDS)[0]


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("from rlkernel.native import taking_rows as unsupported", []),
        ("unsupported = taking('x')", []),
        ("supported = taking('x')", ["native's scale has no unsupported()"]),
    ],
)
def test_what_is_not_supported_may_be_told_elsewhere(line, problems, house):
    tree = house(**plant("rlkernel/native/scale.py", f"{line}\ndef forward(x, factor=1.0): ...\n"))
    assert layout.signatures(tree, BACKENDS) == problems


@pytest.mark.parametrize("folder", ["csrc/cpu/rotate", "csrc/include/rlkernel/rotate"])
def test_a_folder_of_no_op_is_seen(folder, house):
    assert layout.orphans(house(**plant(f"{folder}/terms.h", "")), BACKENDS) == [f"{folder} belongs to no op"]


def test_a_kernel_that_reads_what_python_hands_over_is_seen(house):
    tree = house(**plant("csrc/include/rlkernel/scale/arguments.h", '#include "rlkernel/scale/bind.h"\n'))
    reached = "reaches csrc/include/rlkernel/scale/bind.h"
    assert layout.header_directions(tree) == [
        f"csrc/cpu/scale.cpp {reached}",
        f"csrc/cpu/scale/rows.h {reached}",
    ]


@pytest.mark.parametrize(
    ("script", "circle"),
    [
        ("from rlkernel.integrations import trl", "trl -> rlkernel.integrations.trl.head"),
        ("from . import Head", "trl -> rlkernel.integrations.trl.head"),
        ("class Head:\n    from .. import trl", "trl -> rlkernel.integrations.trl.head"),
        ("from rlkernel.triton_ops import scale", "triton_ops.scale -> rlkernel.integrations.trl.head"),
        ("def head():\n    from rlkernel.integrations import trl", None),
        ("from rlkernel.integrations import _patch", None),
    ],
)
def test_circles_of_imports_are_seen(script, circle, house):
    through_a_link = plant("triton_ops/scale.py", FUNCTIONS + "from rlkernel.integrations.trl import head\n")
    problems = layout_code.import_circles(
        house(**through_a_link, **plant("integrations/trl/head.py", script))
    )
    assert len(problems) == (circle is not None) and (circle or "") in "".join(problems)


@pytest.mark.parametrize("path", ["integrations/verl.py", "integrations/verl/__init__.py"])
def test_a_framework_is_a_file_or_a_package(path, house):
    wanted = ["tests/integrations/test_verl.py", "docs/integrations/verl.md"]
    assert layout.integration_files(house(**plant(path, ""))) == [f"verl has no {file}" for file in wanted]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("takes 12 ms a step", True),
        ("3.2x faster", True),
        ("can be ten times slower, so", True),
        ("reads 1.2 TB/s", True),
        ("huge pages help: 1.6 to 2 times.", True),
        ("is several times as fast.", True),
        ("<!-- bench:begin a -->\n| 12 ms | 2.0x |\n<!-- bench:end a -->", False),
        ("at most twice torch's error; 4 V bytes; every row is read two times", False),
        ("faster than a fault for each", False),
    ],
)
def test_figures_of_speed_are_seen(text, seen, house):
    assert bool(layout_pages.typed_figures(house(**plant("docs/ops/scale.md", text)))) == seen


def test_there_are_ops_and_backends():
    assert layout.ops(ROOT) == dispatch.ops()
    assert len(layout.ops(ROOT)) >= 2


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("KIND != 0", True),
        ("C.term > 2", True),
        ("C.terms[0] == 9", True),
        ("tl.load(x + row * 7) > row", True),
        ("tl.load(x + 4)", True),
        ("C.term == Term.dro", False),
        ("KIND > 2", False),  # a size
        ("row == 2", False),
        ("tl.load(x + row + 1)", False),
    ],
)
def test_a_number_for_a_name_is_seen(code, seen, house):
    problems = layout_code.numbered(house(**plant("triton_ops/scale.py", FUNCTIONS + KERNEL.format(code))))
    assert bool(problems) == seen


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("torch.tensor([1])", ["device"]),
        ("torch.zeros(2)", ["device", "dtype"]),
        ("torch.zeros(2, device=x.device)", ["dtype"]),
        ("torch.randn(2, dtype=x.dtype)", ["device"]),
        ("torch.full((2,), 1, device='cpu')", []),
        ("torch.empty(2, **like)", []),
        ("torch.zeros_like(x) + x.new_zeros(2)", []),
        ("tl.zeros([2], tl.float32)", []),
    ],
)
def test_what_follows_a_default_of_torch_is_seen(code, missing, house):
    problems = layout_code.defaults(house(**plant("rlkernel/ops/scale.py", f"def scale(x):\n    {code}\n")))
    assert [problem.rpartition(" without ")[2] for problem in problems] == [f"{x}=" for x in missing]


def test_a_missing_function_or_unsupported_is_seen(house):
    problems = layout.signatures(house(**plant("rlkernel/native/scale.py", "")), BACKENDS)
    assert problems == ["native's scale has no unsupported()", "native's scale has no forward()"]


def test_a_module_may_be_a_package(house):
    packages = plant("rlkernel/native/scale/__init__.py", "def unsupported(*t): ...")
    root = house(**packages, **plant("rlkernel/native/rotate/__init__.py", ""))
    assert layout.signatures(root, BACKENDS) == ["native's scale has no forward()"]
    assert layout.orphans(root, BACKENDS) == ["rlkernel/native/rotate.* belongs to no op"]


def test_no_file_holds_a_machine_path_an_index_or_a_note_to_oneself():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the list of tracked files is git's")
    assert layout_pages.forbidden_text(ROOT, layout_pages.tracked_files(ROOT)) == []


@pytest.mark.parametrize(
    "line", ["cd /ro" + "ot/x", "pip --index" + "-url u", "# TO" + "DO: later", "cp /ho" + "me/me/a b"]
)
def test_forbidden_text_is_found(line, tmp_path):
    (tmp_path / "a.py").write_text(f"ok\n{line}\n")
    problems = layout_pages.forbidden_text(tmp_path, [tmp_path / "a.py"])
    assert len(problems) == 1 and problems[0].startswith("a.py:2 has")


@pytest.mark.parametrize("package", layout_files.LINKS)
def test_a_linked_package_refuses_its_top_level_name(package):
    command = [sys.executable, "-c", f"import {package}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and f"ImportError: import rlkernel.{package}, not {package}" in run.stderr


def test_extras_and_build_requirements_have_one_home():
    """pyproject.toml names what the build and the extras need; requirements/ what `make` adds to that."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = {_name(r) for r in project["build-system"]["requires"]}
    assert {_name(r) for r in _requirements("build.txt")} == build
    extras = {_name(r) for extra in project["project"]["optional-dependencies"].values() for r in extra}
    assert extras.isdisjoint(_name(r) for f in ("frameworks.txt", "lint.txt") for r in _requirements(f))


def test_every_requirement_is_pinned_for_ci():
    pinned = {_name(r) for r in _requirements("constraints.txt")}
    wanted = [r for f in ("frameworks.txt", "frameworks-no-deps.txt", "lint.txt") for r in _requirements(f)]
    assert [r for r in wanted if _name(r) not in pinned] == []


def _requirements(file):
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _name(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
