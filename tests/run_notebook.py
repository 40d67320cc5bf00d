"""Runs the cells of a notebook in a fresh process, without Jupyter.

    python tests/run_notebook.py examples/rlkernel.ipynb            # prints what each cell prints
    python tests/run_notebook.py examples/rlkernel.ipynb --write    # and keeps it in the notebook

A cell may hold Python alone. What it prints becomes its output; the last expression is shown as Jupyter
shows it.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write(path, notebook):
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    Path(path).write_text(text, encoding="utf-8")


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook):
    """What each cell of code prints, one after the other in one namespace; stops at the first error."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code(notebook), 1):
        body = ast.parse("".join(cell["source"]), f"cell {number}").body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
                if value is not None:
                    print(repr(value))
        yield printed.getvalue()


def outputs(text):
    return [{"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}] if text else []


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path, help="write what each cell printed to this file")
    args = parser.parse_args()
    notebook, file, kept = read(args.notebook), args.notebook.resolve(), args.json and args.json.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # DeepSpeed, where it is installed, prints what it has found
    warnings.simplefilter("ignore", FutureWarning)  # of transformers about its own arguments
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))  # as the kernel of a notebook has it
    found = list(execute(notebook))
    for number, (cell, text) in enumerate(zip(code(notebook), found, strict=True), 1):
        print(f"[{number}]\n{text}", end="")
        cell["outputs"], cell["execution_count"] = outputs(text), number
    if args.write:
        write(file, notebook)
    if kept:
        kept.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
