"""The rules of the house as functions ``check(root) -> [problem, ...]``: where everything stands.

Those of code are in layout_code.py, those of text in layout_pages.py.  They read files and import nothing:
test_layout.py also runs each of them on a tree that breaks its rule.
"""

import ast
import re
import sys
from pathlib import Path

import layout_files as files

# Everything that an op must have, under its own name.
OP_FILES = (
    "rlkernel/calls/{op}.py",
    "rlkernel/reference/{op}.py",
    "tests/test_{op}.py",
    "benchmarks/{op}.py",
    "docs/ops/{op}.md",
)

# What the folder of an op in csrc/include/rlkernel holds, and what some hold beyond it.
HEADERS = ("arguments.h", "bind.h", "direct.h", "terms.h", "kernel.cuh")
MORE_HEADERS = {
    "logprob": ("rows.h", "row.cuh", "forward.cuh", "backward.cuh", "support.cuh"),
    "policy_loss": ("math.h", "correction.h", "sequence.h", "selection.h", "selection.cuh"),
    "preference_loss": ("math.h",),
    "sampling": (
        "stream.h", "mass.cuh", "row.cuh", "tokens.cuh", "statistics.cuh", "finish.cuh", "walk.cuh",
        "search.cuh", "filter.cuh", "kept.cuh", "launch.cuh",
    ),
    "whiten": ("moments.cuh",),
}  # fmt: skip
INCLUDE = re.compile(r'#include\s*[<"]([^>"]+)[>"]')


def ops(root: Path) -> list[str]:
    return files.stems(root / "rlkernel/ops", "*.py")


def op_files(root: Path) -> list[str]:
    return [
        f"{op} has no {pattern.format(op=op)}"
        for op in ops(root)
        for pattern in OP_FILES
        if not (root / pattern.format(op=op)).is_file()
    ]


def op_exports(root: Path) -> list[str]:
    """Every op has a public function that ``rlkernel`` imports from it and lists in ``__all__``."""
    tree = files.tree_of(root / "rlkernel/__init__.py")
    public = set(files.literal_of(tree, "__all__") or [])
    problems = []
    for op in ops(root):
        imports = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom))
        names = {alias.name for n in imports if n.module == f"rlkernel.ops.{op}" for alias in n.names}
        if not names & public:
            problems.append(f"rlkernel.__all__ has no name of rlkernel.ops.{op}")
    return problems


def orphans(root: Path, backends: dict[str, str]) -> list[str]:
    """Files that belong to no op: a kernel that nobody calls, a page about nothing."""
    known = ops(root)
    headers = {p.stem for p in (root / "csrc").rglob("*.h")}
    folders = [(files.module_folder(root, module), "*.py") for module in backends.values()]
    folders += [(root / "csrc" / part, "*.*") for part in ("cpu", "cuda", "hip")]
    folders += [(root / "benchmarks", "*.py"), (root / "docs/ops", "*.md")]
    problems = []
    for folder, pattern in folders:
        for stem in files.stems(folder, pattern):
            # logprob_sm90.cu specialises logprob; isa.cpp is the body of isa.h, which has a rule of its own
            belongs = any(stem == op or stem.startswith(f"{op}_") for op in known)
            if not belongs and not (folder.parent.name == "csrc" and stem in headers - set(known)):
                problems.append(f"{folder.relative_to(root)}/{stem}.* belongs to no op")
    for folder in (root / "csrc/cpu", root / "csrc/include/rlkernel"):
        folders_of = sorted(p for p in folder.glob("*/") if p.name not in known)
        problems += [f"{p.relative_to(root)} belongs to no op" for p in folders_of]
    return problems


def headers(root: Path) -> list[str]:
    """The folder of an op holds what every such folder holds, or what is named above."""
    return [
        f"{path.relative_to(root)} is none of {', '.join(HEADERS)} nor named in tests/layout.py"
        for path in sorted((root / "csrc/include/rlkernel").glob("*/*"))
        if path.name not in (*HEADERS, *MORE_HEADERS.get(path.parent.name, ()))
    ]


def header_directions(root: Path) -> list[str]:
    """What ops share includes no op's headers, and no kernel reaches what reads Python's arguments."""
    shared = root / "csrc/include/rlkernel"
    problems = [
        f"{path.relative_to(root)}, which ops share, includes {other.relative_to(root)}"
        for path in sorted(shared.glob("*.*h"))
        for other in _included(root, path)
        if path.name != "kernels.h" and other.parent.parent == shared
    ]
    for source in sorted(
        (p for part in ("cpu", "cuda", "hip") for p in (root / "csrc" / part).rglob("*.*")), key=str
    ):
        reached = [source]
        for path in reached:
            reached += [p for p in _included(root, path) if p not in reached]
        problems += [
            f"{source.relative_to(root)} reaches {path.relative_to(root)}"
            for path in reached
            if path.name.endswith("bind.h") or path == shared / "call.h"
        ]
    return problems


def _included(root: Path, path: Path) -> list[Path]:
    """The files of the tree that a source includes."""
    folders = (path.parent, root / "csrc/include", root / "csrc/emulation")
    places = (
        (folder / name).resolve() for name in INCLUDE.findall(files.text_of(path)) for folder in folders
    )
    return [place for place in places if place.is_file()]


def orphan_headers(root: Path) -> list[str]:
    sources = [p for p in (root / "csrc").rglob("*") if p.is_file()] + list((root / "tests").rglob("*.c*"))
    included = {header for p in sources for header in _included(root, p)}
    every = (p for p in sources if p.suffix in (".h", ".cuh"))
    return [f"nothing includes {p.relative_to(root)}" for p in every if p.resolve() not in included]


def torch_headers(root: Path) -> list[str]:
    pattern = re.compile(r'#include\s*[<"](torch|ATen|c10|caffe2)/')
    sources = (p for p in (root / "csrc").rglob("*") if p.is_file())
    return [
        f"{p.relative_to(root)} includes a torch header" for p in sources if pattern.search(files.text_of(p))
    ]


def signatures(root: Path, backends: dict[str, str]) -> list[str]:
    """Every backend's module of an op has ``unsupported`` and the reference's functions, parameters alike."""
    problems = []
    for op in ops(root):
        reference = files.functions_of(root / f"rlkernel/reference/{op}.py")
        reference.pop("make_inputs", None)
        for backend, module in backends.items():
            path = files.module_file(files.module_folder(root, module), op)
            if not path.is_file():
                continue
            functions = files.functions_of(path)
            if "unsupported" not in files.bound_names(path):
                problems.append(f"{backend}'s {op} has no unsupported()")
            for name, parameters in reference.items():
                if name == "unsupported":
                    continue
                if name not in functions:
                    problems.append(f"{backend}'s {op} has no {name}()")
                elif functions[name] != parameters:
                    problems.append(
                        f"{backend}'s {op}.{name} must take ({parameters}), got ({functions[name]})"
                    )
    return problems


def backend_folders(root: Path, backends: dict[str, str]) -> list[str]:
    """A backend that is named has at least one op."""
    return [
        f"backend {name} has no module in {module}"
        for name, module in backends.items()
        if not files.stems(files.module_folder(root, module), "*.py")
    ]


def backend_imports(root: Path, backends: dict[str, str]) -> list[str]:
    """A backend imports neither another backend nor the reference."""
    problems = []
    for backend, module in backends.items():
        others = [other for other in backends.values() if other != module]
        for path in sorted(files.module_folder(root, module).glob("**/*.py")):
            for imported in files.imports_of(path, module):
                if any(f"{imported}.".startswith(f"{other}.") for other in others):
                    problems.append(f"{backend}'s {path.name} imports {imported}")
    return problems


def reference_imports(root: Path) -> list[str]:
    """The reference shares no code with what it judges: torch, the standard library, and what calls are made
    of."""
    own = ("rlkernel.reference.", "rlkernel.calls.")
    problems = []
    for path in sorted((root / "rlkernel/reference").glob("**/*.py")):
        for imported in files.imports_of(path, "rlkernel.reference"):
            first = imported.partition(".")[0]
            if first not in ("torch", *sys.stdlib_module_names) and not f"{imported}.".startswith(own):
                problems.append(f"the reference's {path.name} imports {imported}")
    return problems


def links(root: Path) -> list[str]:
    problems = []
    for name in files.LINKS:
        link = root / "rlkernel" / name
        if not link.is_symlink() or str(link.readlink()) != f"../{name}":
            problems.append(f"rlkernel/{name} must be a link to ../{name}")
        elif not (link / "__init__.py").is_file():
            problems.append(f"rlkernel/{name} does not resolve to a package")
    return problems


def integration_files(root: Path) -> list[str]:
    patterns = ("tests/integrations/test_{}.py", "docs/integrations/{}.md")
    names = files.stems(root / "integrations", "*.py")
    wanted = [(name, pattern.format(name)) for name in names for pattern in patterns]
    return [f"{name} has no {path}" for name, path in wanted if not (root / path).is_file()]


def test_modules(root: Path) -> list[str]:
    """No module of tests has the name of one in a folder above it: pytest puts both folders on the path, and
    ``import`` finds either."""
    tests = root / "tests"
    problems = []
    for path in sorted(tests.rglob("*.py")):
        above = path.relative_to(tests).parents[1:]
        if path.name not in ("conftest.py", "__init__.py") and any(
            (tests / f / path.name).is_file() for f in above
        ):
            problems.append(f"{path.relative_to(root)} has the name of a module in a folder above it")
    return problems


def stubs(root: Path) -> list[str]:
    """``_C.pyi`` has each kernel of ``kernels.h``."""
    kernels = re.findall(r"^  KERNEL\((\w+)\)", files.text_of(root / "csrc/include/rlkernel/kernels.h"), re.M)
    tree = files.tree_of(root / "rlkernel/_C.pyi")
    parts = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    methods = [n.name for part in parts for n in part.body if isinstance(n, ast.FunctionDef)]
    typed = {name for name in methods if not name.startswith("_")}
    return [f"{n} is in only one of csrc's kernels.h and rlkernel/_C.pyi" for n in sorted({*kernels} ^ typed)]
