"""The rules of what Python and Triton code says: see layout.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

import layout_files as files

# They hand out adapters, which may use them: see import_circles.
DOORS = ("rlkernel", "rlkernel._frameworks")
# What torch makes on its default device; of the first ones the default dtype, too.
FLOATS = ("empty", "linspace", "ones", "rand", "randn", "zeros")
MADE = (*FLOATS, "arange", "as_tensor", "asarray", "eye", "full", "randint", "randperm", "tensor")


def import_circles(root: Path) -> list[str]:
    """Modules that import each other, also through others, when they are loaded or only for their types.

    What a function imports when it is called makes no circle; a package is imported by its own name only. Nor
    do the types of what is behind a door: a framework's adapter uses the package that hands it out.
    """
    paths = {}
    for folder in ("rlkernel", *files.LINKS):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if path.name == "__init__.py" else parts
            paths[".".join(parts if folder == "rlkernel" else ("rlkernel", *parts))] = path
    arrows = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        imported = list(
            files.imports_of(path, package, _as_loaded(files.tree_of(path), types=module not in DOORS))
        )
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
        for function in ast.walk(files.tree_of(path)):
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
    for path in sorted(p for folder in ("rlkernel", *files.LINKS[:2]) for p in (root / folder).rglob("*.py")):
        if path.is_relative_to(root / "rlkernel/bench"):  # a program of its own
            continue
        for node in ast.walk(files.tree_of(path)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not name.startswith("torch.") or name[6:] not in MADE:
                continue
            given = {keyword.arg for keyword in node.keywords}
            wanted = ("device", "dtype") if name[6:] in FLOATS else ("device",)
            missing = [x for x in wanted if not {x, None} & given]
            where = f"{path.relative_to(root)}:{node.lineno}"
            problems += [f"{where} has a {name} without {x}=" for x in missing]
    return problems
