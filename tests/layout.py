"""The rules of the house as functions ``check(root) -> [problem, ...]``.

They read files and import nothing: test_layout.py also runs each of them on a tree that breaks its rule.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

LINKS = ("triton_ops", "integrations", "benchmarks")

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
PAGE_SECTIONS = ("What changes", "What does not", "Versions", "Limits", "Measured")
# What torch makes on its default device; of the first ones the default dtype, too.
FLOATS = ("empty", "linspace", "ones", "rand", "randn", "zeros")
MADE = (*FLOATS, "arange", "as_tensor", "asarray", "eye", "full", "randint", "randperm", "tensor")
INCLUDE = re.compile(r'#include\s*[<"]([^>"]+)[>"]')


def ops(root: Path) -> list[str]:
    return _stems(root / "rlkernel/ops", "*.py")


def op_files(root: Path) -> list[str]:
    return [
        f"{op} has no {pattern.format(op=op)}"
        for op in ops(root)
        for pattern in OP_FILES
        if not (root / pattern.format(op=op)).is_file()
    ]


def op_exports(root: Path) -> list[str]:
    """Every op has a public function that ``rlkernel`` imports from it and lists in ``__all__``."""
    tree = _parse(root / "rlkernel/__init__.py")
    public = set(_literal(tree, "__all__") or [])
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
    folders = [(_folder(root, module), "*.py") for module in backends.values()]
    folders += [(root / "csrc" / part, "*.*") for part in ("cpu", "cuda", "hip")]
    folders += [(root / "benchmarks", "*.py"), (root / "docs/ops", "*.md")]
    problems = []
    for folder, pattern in folders:
        for stem in _stems(folder, pattern):
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
    places = ((folder / name).resolve() for name in INCLUDE.findall(_text(path)) for folder in folders)
    return [place for place in places if place.is_file()]


def orphan_headers(root: Path) -> list[str]:
    sources = [p for p in (root / "csrc").rglob("*") if p.is_file()] + list((root / "tests").rglob("*.c*"))
    included = {header for p in sources for header in _included(root, p)}
    every = (p for p in sources if p.suffix in (".h", ".cuh"))
    return [f"nothing includes {p.relative_to(root)}" for p in every if p.resolve() not in included]


def torch_headers(root: Path) -> list[str]:
    pattern = re.compile(r'#include\s*[<"](torch|ATen|c10|caffe2)/')
    sources = (p for p in (root / "csrc").rglob("*") if p.is_file())
    return [f"{p.relative_to(root)} includes a torch header" for p in sources if pattern.search(_text(p))]


def signatures(root: Path, backends: dict[str, str]) -> list[str]:
    """Every backend's module of an op has ``unsupported`` and the reference's functions, parameters alike."""
    problems = []
    for op in ops(root):
        reference = _functions(root / f"rlkernel/reference/{op}.py")
        reference.pop("make_inputs", None)
        for backend, module in backends.items():
            path = _module(_folder(root, module), op)
            if not path.is_file():
                continue
            functions = _functions(path)
            if "unsupported" not in _bound(path):
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
        if not _stems(_folder(root, module), "*.py")
    ]


def backend_imports(root: Path, backends: dict[str, str]) -> list[str]:
    """A backend imports neither another backend nor the reference."""
    problems = []
    for backend, module in backends.items():
        others = [other for other in backends.values() if other != module]
        for path in sorted(_folder(root, module).glob("**/*.py")):
            for imported in _imports(path, module):
                if any(f"{imported}.".startswith(f"{other}.") for other in others):
                    problems.append(f"{backend}'s {path.name} imports {imported}")
    return problems


def reference_imports(root: Path) -> list[str]:
    """The reference shares no code with what it judges: torch, the standard library, and what calls are made
    of."""
    own = ("rlkernel.reference.", "rlkernel.calls.")
    problems = []
    for path in sorted((root / "rlkernel/reference").glob("**/*.py")):
        for imported in _imports(path, "rlkernel.reference"):
            first = imported.partition(".")[0]
            if first not in ("torch", *sys.stdlib_module_names) and not f"{imported}.".startswith(own):
                problems.append(f"the reference's {path.name} imports {imported}")
    return problems


DOORS = ("rlkernel", "rlkernel._frameworks")


def import_circles(root: Path) -> list[str]:
    """Modules that import each other, also through others, when they are loaded or only for their types.

    What a function imports when it is called makes no circle; a package is imported by its own name only. Nor
    do the types of what is behind a door: a framework's adapter uses the package that hands it out.
    """
    paths = {}
    for folder in ("rlkernel", *LINKS):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if path.name == "__init__.py" else parts
            paths[".".join(parts if folder == "rlkernel" else ("rlkernel", *parts))] = path
    arrows = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        imported = list(_imports(path, package, _as_loaded(_parse(path), types=module not in DOORS)))
        named = [name if name in paths else name.rpartition(".")[0] for name in imported]
        arrows[module] = [name for name in named if name in paths and name != module]
    problems: list[str] = []
    seen: set[str] = set()
    for module in paths:
        if module not in seen and (circle := _circle(module, arrows)):
            seen.update(circle)
            problems.append(f"{' -> '.join(circle)} is a circle of imports")
    return problems


def _circle(start: str, arrows: dict[str, list[str]]) -> list[str]:
    """The shortest way from a module back to it."""
    ways = [[start]]
    reached: set[str] = set()
    for way in ways:
        for name in arrows[way[-1]]:
            if name == start:
                return [*way, start]
            if name not in reached:
                reached.add(name)
                ways.append([*way, name])
    return []


def _as_loaded(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    """What of a tree runs when its module is loaded, or is there for its types: no bodies of functions."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and (types or not for_types):
            yield child
            yield from _as_loaded(child, types)


def numbered(root: Path) -> list[str]:
    """Numbers in Triton kernels that have a name: a choice compared with one, a column of a table."""
    problems = []
    for path in sorted((root / "triton_ops").glob("*.py")):
        for function in ast.walk(_parse(path)):
            if isinstance(function, ast.FunctionDef) and function.decorator_list:
                problems += [
                    f"{path.name}:{n.lineno} has a number for a name: {ast.unparse(n)}"
                    for n in _numbered(function)
                ]
    return problems


def _numbered(function: ast.FunctionDef) -> Iterator[ast.AST]:
    parameters = {a.arg for a in function.args.args}
    choices = {a.arg for a in function.args.args if a.annotation and "constexpr" in ast.unparse(a.annotation)}
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            # a parameter itself may be a size, which is larger or smaller than a number
            if not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                sides = [x for x in sides if not isinstance(x, ast.Name)]
            if any(_root(x) in choices for x in sides) and any(_integer(x) is not None for x in sides):
                yield node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "tl.load",
            "tl.store",
            "tl.atomic_add",
        ):
            yield from (x for x in ast.walk(node.args[0]) if _column(x))
        elif isinstance(node, ast.Assign) and _column(node.value) and _root(node.value.left) in parameters:
            yield node.value  # the row of a table


def _column(node: ast.AST) -> bool:
    """``x + 2``, ``x + y * 3``: the next entry, ``x + 1``, needs no name."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return False
    right = node.right
    is_product = isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult)
    return (_integer(right) or 0) > 1 or (is_product and (_integer(right.right) or 0) > 2)


def _integer(node: ast.AST) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _root(node: ast.AST) -> str:
    """``x`` of ``x.y[z]``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def defaults(root: Path) -> list[str]:
    """Tensors that would follow ``torch.set_default_device`` or ``set_default_dtype``, which users set."""
    problems = []
    for path in sorted(p for folder in ("rlkernel", *LINKS[:2]) for p in (root / folder).rglob("*.py")):
        if path.is_relative_to(root / "rlkernel/bench"):  # a program of its own
            continue
        for node in ast.walk(_parse(path)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not name.startswith("torch.") or name[6:] not in MADE:
                continue
            given = {keyword.arg for keyword in node.keywords}
            wanted = ("device", "dtype") if name[6:] in FLOATS else ("device",)
            missing = [x for x in wanted if not {x, None} & given]
            where = f"{path.relative_to(root)}:{node.lineno}"
            problems += [f"{where} has a {name} without {x}=" for x in missing]
    return problems


def links(root: Path) -> list[str]:
    problems = []
    for name in LINKS:
        link = root / "rlkernel" / name
        if not link.is_symlink() or str(link.readlink()) != f"../{name}":
            problems.append(f"rlkernel/{name} must be a link to ../{name}")
        elif not (link / "__init__.py").is_file():
            problems.append(f"rlkernel/{name} does not resolve to a package")
    return problems


def integration_files(root: Path) -> list[str]:
    patterns = ("tests/integrations/test_{}.py", "docs/integrations/{}.md")
    names = _stems(root / "integrations", "*.py")
    wanted = [(name, pattern.format(name)) for name in names for pattern in patterns]
    return [f"{name} has no {path}" for name, path in wanted if not (root / path).is_file()]


def commands(root: Path) -> list[str]:
    """``make`` targets, modules and scripts that a page tells the reader to run, and that do not exist."""
    targets = set(re.findall(r"^([a-z0-9-]+):", _text(root / "Makefile"), re.M))
    problems = []
    for page in _pages(root):
        # only code, in a line or in a block: prose may say "make sure"
        text = _text(page)
        code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"```.*?\n(.*?)```", text, re.S))
        where = page.relative_to(root)
        for line in re.findall(r"^\s*(?:\$ )?make((?: [a-z0-9-]+)+)", code, re.M):
            problems += [f"{where}: make has no target {t}" for t in line.split() if t not in targets]
        for module in re.findall(r"python -m (rlkernel[\w.]*)", code):
            path = root / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                problems.append(f"{where}: there is no module {module}")
        for script in re.findall(r"(?:python|bash) ([\w./]+/[\w.]+)", code):
            if not (root / script).is_file():
                problems.append(f"{where}: there is no {script}")
    return problems


def orphan_pages(root: Path) -> list[str]:
    """Pages of the documentation that no other page links to."""
    linked = {
        (page.parent / target).resolve()
        for page in _pages(root)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", _text(page))
        if "://" not in target
    }
    pages = [p for p in (root / "docs").rglob("*.md") if p.name != "index.md"]
    return [f"no page links to {p.relative_to(root)}" for p in sorted(pages) if p.resolve() not in linked]


def integration_pages(root: Path) -> list[str]:
    """What a page about a framework must tell: code first, then these sections, and a table by the tool."""
    problems = []
    for page in sorted((root / "docs/integrations").glob("*.md")):
        text = _text(page)
        missing = [f"no section {name!r}" for name in PAGE_SECTIONS if f"\n## {name}\n" not in text]
        measured = text.partition("\n## Measured\n")[2].partition("\n## ")[0]
        if not missing and "<!-- bench:begin " not in measured:
            missing.append("no table of the tool in 'Measured'")
        if "\n```python\nimport rlkernel\n" not in text.partition("\n## ")[0]:
            missing.append("no python in front of its first section")
        problems += [f"{page.relative_to(root)} has {what}" for what in missing]
    return problems


def environment(root: Path) -> list[str]:
    """Environment variables that the code reads and no page mentions, or the other way round."""
    pattern = re.compile(r"\bRLKERNEL_[A-Z][A-Z_]*[A-Z]\b")
    # what code reads is a string or a macro argument of getenv; a bare word is a C++ macro
    read = re.compile(r"""["'](RLKERNEL_[A-Z][A-Z_]*[A-Z])["']""")
    sources = [root / "setup.py", *(p for p in (root / "csrc").rglob("*") if p.is_file())]
    sources += [p for folder in ("rlkernel", *LINKS) for p in (root / folder).rglob("*.py")]
    used = {name for p in sources if p.is_file() for name in read.findall(_text(p))}
    told = {name for p in _pages(root) for name in pattern.findall(_text(p))}
    problems = [f"{name} is not documented" for name in sorted(used - told)]
    return problems + [f"{name} is documented, but nothing reads it" for name in sorted(told - used)]


def stubs(root: Path) -> list[str]:
    """``_C.pyi`` has each kernel of ``kernels.h``."""
    kernels = re.findall(r"^  KERNEL\((\w+)\)", _text(root / "csrc/include/rlkernel/kernels.h"), re.M)
    tree = _parse(root / "rlkernel/_C.pyi")
    parts = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    methods = [n.name for part in parts for n in part.body if isinstance(n, ast.FunctionDef)]
    typed = {name for name in methods if not name.startswith("_")}
    return [f"{n} is in only one of csrc's kernels.h and rlkernel/_C.pyi" for n in sorted({*kernels} ^ typed)]


def tracked_files(root: Path) -> list[Path]:
    """The files of the checkout, as git sees them: committed or about to be."""
    # a container may run as another user than the one that cloned, which git refuses unless told
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files"]
    command += ["--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [root / n for n in names if (root / n).is_file()]


def forbidden_text(root: Path, files: list[Path]) -> list[str]:
    """Paths of the machine that a file was written on, package indexes, and notes to oneself."""
    rules = {
        "a path of somebody's machine": r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+|opt/pypi\w*|tmp/\w+)/",
        "a package index": r"--(?:extra-)?index-url|file:///\w",
        "a note to oneself": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    }
    problems = []
    for path in files:
        text = _text(path)
        if "\0" in text:  # a picture
            continue
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path.relative_to(root)}:{number}"
            problems += [f"{where} has {what}" for what, rule in rules.items() if re.search(rule, line)]
    return problems


def typed_figures(root: Path) -> list[str]:
    """Figures of speed in a page, which only a tool may write, between its markers."""
    number = r"(?:\b\d[\d.]*x?|\b(?:two|three|four|five|ten|several|many))"
    compared = r"(?:times )?(?:as )?(?:fast|slow|quick)(?:er)?\b"
    units = r"\b\d[\d.]* ?(?:ms|µs|GB/s|TB/s|[TG]FLOP/s|tokens/s)(?!\w)"
    rule = re.compile(rf"{number} {compared}|{number} times[.;:]|{units}")
    problems = []
    for page in _pages(root):
        text = re.sub(
            r"<!-- bench:begin (\S+) -->.*?<!-- bench:end \1 -->", _blank, _text(page), flags=re.DOTALL
        )
        for line, words in enumerate(text.splitlines(), 1):
            if found := rule.search(words):
                problems.append(f"{page.relative_to(root)}:{line} has a figure typed by hand: {found[0]}")
    return problems


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _stems(folder: Path, pattern: str) -> list[str]:
    names = {p.name for p in folder.glob(pattern) if p.is_file()}
    names |= {p.parent.name for p in folder.glob("*/__init__.py")}  # a package is a module of many files
    return sorted({name.partition(".")[0] for name in names if not name.startswith(("_", "."))})


def _module(folder: Path, name: str) -> Path:
    package = folder / name / "__init__.py"
    return package if package.is_file() else folder / f"{name}.py"


def _folder(root: Path, module: str) -> Path:
    return root / module.replace(".", "/")


def _pages(root: Path) -> list[Path]:
    pages = (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md")))
    return [p for p in pages if p.is_file()]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""


def _parse(path: Path) -> ast.Module:
    return ast.parse(_text(path), str(path))


def _literal(tree: ast.Module, name: str) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def _functions(path: Path) -> dict[str, str]:
    """The public top-level functions of a file and the text of their parameters, without annotations."""
    functions = {}
    for node in _parse(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = node.args
            for argument in ast.walk(arguments):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            functions[node.name] = ast.unparse(arguments)
    return functions


def _bound(path: Path) -> set[str]:
    """The names that a file binds at its top level: it defines, assigns or imports them."""
    names = set(_functions(path))
    for node in _parse(path).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _imports(path: Path, package: str, nodes: Iterable[ast.AST] | None = None) -> Iterator[str]:
    """The absolute names that a file of ``package`` imports, anywhere in it or in some nodes of its tree."""
    for node in ast.walk(_parse(path)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
