"""What a build costs and what comes out, for ``readme``: reports of `.ci/wheels.py` and its neighbours."""

from typing import Any

from rlkernel.bench import render

Stored = dict[str, Any]
LEAST = 8.0  # CPU seconds of a file that has a line of its own


def build(stored: Stored) -> str:
    """Of each source the CPU seconds, before and now; all that is compiled from one is one line."""
    before, now = (_by_source(stored[name]) for name in ("before", "now"))
    long = [name for name in {**before, **now} if max(before.get(name, 0), now.get(name, 0)) >= LEAST]
    long.sort(key=lambda name: -before.get(name, 0))
    rows = [[f"`{name}`", *(_seconds(of.get(name, 0)) for of in (before, now))] for name in long]
    rest = [sum(of.values()) - sum(of.get(name, 0) for name in long) for of in (before, now)]
    rows += [
        ["all others", *map(_seconds, rest)],
        ["**all**", *(_seconds(sum(of.values())) for of in (before, now))],
    ]
    columns = ("source", f"{stored['before']['commit']}, s", f"{stored['now']['commit']}, s")
    return _table(stored["command"], columns, rows)


def _by_source(tree: Stored) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in tree["cpu_seconds"].items():
        found[name] = found.get(name, 0.0) + seconds
    return found


def _seconds(value: float) -> str:
    return f"{value:.1f}"


def wheels(stored: Stored) -> str:
    rows = []
    for row in stored["wheels"]:
        _, _, python, _, platform = row["wheel"].removesuffix(".whl").split("-")
        kernels = row["parts"].replace(",", ", ")
        rows.append([python, kernels, platform, f"{row['bytes'] / 1e6:.1f}", _seconds(row["cpu_seconds"])])
    columns = ("Python", "kernels", "platform", "MB", "CPU seconds")
    return _table(stored["command"], columns, rows)


def clean_machine(stored: Stored) -> str:
    rows = [[f"`{row['command']}`", _seconds(row["seconds"])] for row in stored["commands"]]
    return _table(f"python .ci/clean_machine.py dist/{stored['wheel']}", ("command", "seconds"), rows)


def _table(command: str, columns: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join([f"`$ {command}`", "", *render.markdown_table(columns, rows)]) + "\n"
