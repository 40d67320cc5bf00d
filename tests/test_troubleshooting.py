"""What the page on troubleshooting quotes is what the code says."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"```text\n(.*?)\n```", PAGE, re.S)


@functools.cache
def said():
    """The texts of the code, with an ellipsis where something is put in."""
    folders = (ROOT / "rlkernel", ROOT / "integrations")  # the links of rlkernel are not followed
    files = [ROOT / "setup.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [x.value if isinstance(x, ast.Constant) else "..." for x in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def pieces(message):
    return [piece for piece in re.split(r"\.\.\.", message) if len(piece.strip(" ;:,()")) > 3]


@pytest.mark.parametrize("message", QUOTED)
def test_it_is_said(message):
    wanted = pieces(message)
    assert wanted and any(wanted[0] in text for text in said()), f"nothing says {wanted[0]!r}"
    for piece in wanted[1:]:
        assert any(piece in text for text in said()), f"nothing says {piece!r}"


def test_another_message_is_not():
    assert not any("rlkernel._C is not there: " in text for text in said())
