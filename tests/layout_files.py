"""What the rules of the house read: files, their names, functions and imports."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

LINKS = ("triton_ops", "integrations", "benchmarks")


def stems(folder: Path, pattern: str) -> list[str]:
    names = {p.name for p in folder.glob(pattern) if p.is_file()}
    names |= {p.parent.name for p in folder.glob("*/__init__.py")}  # a package is a module of many files
    return sorted({name.partition(".")[0] for name in names if not name.startswith(("_", "."))})


def module_file(folder: Path, name: str) -> Path:
    package = folder / name / "__init__.py"
    return package if package.is_file() else folder / f"{name}.py"


def module_folder(root: Path, module: str) -> Path:
    return root / module.replace(".", "/")


def pages(root: Path) -> list[Path]:
    pages = (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md")))
    return [p for p in pages if p.is_file()]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


def literal_of(tree: ast.Module, name: str) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def functions_of(path: Path) -> dict[str, str]:
    """The public top-level functions of a file and the text of their parameters, without annotations."""
    functions = {}
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = node.args
            for argument in ast.walk(arguments):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            functions[node.name] = ast.unparse(arguments)
    return functions


def bound_names(path: Path) -> set[str]:
    """The names that a file binds at its top level: it defines, assigns or imports them."""
    names = set(functions_of(path))
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def imports_of(path: Path, package: str, nodes: Iterable[ast.AST] | None = None) -> Iterator[str]:
    """The absolute names that a file of ``package`` imports, anywhere in it or in some nodes of its tree."""
    for node in ast.walk(tree_of(path)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
