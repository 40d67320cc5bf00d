"""``readme``: the tables of README.md and docs, written from the committed reports between their markers.

``<!-- bench:begin NAME -->`` ... ``<!-- bench:end NAME -->`` holds the newest
``benchmarks/results/<date>-NAME.json``; of the names in ``MADE``, what a function makes of all reports.
"""

import json
import re
from pathlib import Path

from rlkernel.bench import render, report, status, trainer_step
from rlkernel.bench.cases import UsageError

_MARKED = re.compile(r"(<!-- bench:begin (?P<name>\S+) -->\n).*?(<!-- bench:end (?P=name) -->)", re.DOTALL)


def newest(results: Path, name: str) -> Path:
    """The newest report called ``name``; its date leads the file's name.

    Raises:
        UsageError: there is none.
    """
    found = sorted(results.glob(f"????-??-??-{name}.json"))
    if not found:
        known = sorted({path.stem[11:] for path in results.glob("????-??-??-*.json")})
        raise UsageError(
            f"bench:begin must name a report of {results} ({', '.join(known) or 'it has none'}), got {name}"
        )
    return found[-1]


MADE = {
    "status": status.table,
    "status-line": status.line,
    "grpo_prefix": lambda results: trainer_step.markdown(
        json.loads(newest(results, "grpo_prefix").read_text())
    ),
}


def pages(root: Path) -> list[Path]:
    """README.md, and the pages of docs that hold a table."""
    marked = (page for page in sorted((root / "docs").rglob("*.md")) if _MARKED.search(page.read_text()))
    return [root / "README.md", *marked]


def fill(text: str, results: Path) -> str:
    """``text`` with every marked table written anew."""

    def table(match: re.Match[str]) -> str:
        if make := MADE.get(match["name"]):
            return f"{match[1]}{make(results)}{match[3]}"
        stored = report.load(newest(results, match["name"]))
        return f"{match[1]}{render.markdown(stored['rows'], stored['header'])}{match[3]}"

    return _MARKED.sub(table, text)
