"""``compare A.json B.json``: the times of two runs, row by row."""

import re
from typing import Any

from rlkernel.bench.cases import UsageError
from rlkernel.bench.render import Table, milliseconds
from rlkernel.bench.run import Row

KEY = ("op", "case", "dtype", "device", "backend", "pass")


def compare(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Rows that both reports have timed, with how many times faster the second is.

    Raises:
        UsageError: they have no row in common.
    """
    old, new = (_timed(report["rows"]) for report in (before, after))
    common = [key for key in old if key in new]
    if not common:
        raise UsageError("the reports must have a timed row in common, got none")
    commits = [f"{report['header']['commit']} ({report['header']['date']})" for report in (before, after)]
    table = Table("", [*KEY, f"A {commits[0]} ms", f"B {commits[1]} ms", "A/B"], [])
    for key in common:
        a, b = old[key]["seconds"], new[key]["seconds"]
        table.rows.append([*key, milliseconds(a), milliseconds(b), f"{a / b:.2f}x"])
    for name, reports in (("A", (old, new)), ("B", (new, old))):
        if only := [key for key in reports[0] if key not in reports[1]]:
            table.notes.append(f"only in {name}: {len(only)} row{'s' * (len(only) != 1)}")
    if _machine(before) != _machine(after):
        table.notes.append("the machines differ: the ratios compare machines too")
    return table


def slower(before: dict[str, Any], after: dict[str, Any], gate: float) -> list[str]:
    """Rows of the second report that are not ``gate`` times as fast as in the first."""
    old, new = (_timed(report["rows"]) for report in (before, after))
    speedup = {key: old[key]["seconds"] / new[key]["seconds"] for key in old if key in new}
    return [f"{' '.join(key)}: {ratio:.2f}x" for key, ratio in speedup.items() if ratio < gate]


def _machine(report: dict[str, Any]) -> dict[str, str]:
    """As it is written now: older reports say "1 threads"."""
    machine = report["header"]["machine"]
    return {name: re.sub(r"\b1 threads", "1 thread", value) for name, value in machine.items()}


def _timed(rows: list[Row]) -> dict[tuple[str, ...], Row]:
    return {tuple(row[part] for part in KEY): row for row in rows if row["seconds"]}
