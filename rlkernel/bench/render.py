"""Rows as tables: for a terminal, for Markdown. What is compared with what is written above each."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rlkernel.bench.run import Row

MIB, GIB = 2**20, 2**30
LEGEND = (
    "error: largest deviation of an output from fp64; forward+backward: relative error of the worst gradient",
    "peer columns: the peer's time / ours (2.0x: we are twice as fast); floor: least possible time / ours",
)
ERROR_LEGEND = "peer columns: the peer's error (in brackets: divided by ours)"
SPREAD_LEGEND = "spread: half of what the middle half of the rounds lies between, of their median"
NO_SPREAD_LEGEND = (
    "spread: unknown, since this report is older than the tool's record of its rounds; ms are medians"
)
HOST_LEGEND = "ms: of the GPU, its launches queued before; host ms: what Python needs to queue them"
BEATEN = (
    "floor above 100%: the call did less than the floor counts, or did it faster than the GEMMs and copies "
    "that the floor was measured with"
)
CARD = 80 * GIB
Peak = tuple[int | None, str]  # bytes, and why it did not run


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def aligned(self) -> list[str]:
        """Its lines in plain text, every column as wide as its widest cell."""
        grid = [self.columns, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
        return [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in grid
        ]

    def text(self) -> str:
        return "\n".join([*self.aligned(), *(f"  {note}" for note in self.notes)]) + "\n"


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table per op, and one per series of memory cases."""
    made = []
    for op in dict.fromkeys(row["op"] for row in rows):
        own = [row for row in rows if row["op"] == op]
        if plain := [row for row in own if row["axis"] is None]:
            made.append(_op_table(op, plain))
        staged = [row for row in own if row["axis"] is not None]
        for key in dict.fromkeys(map(_stage, staged)):
            made += _memory_tables(op, key[0], [row for row in staged if _stage(row) == key])
    return made


def _op_table(op: str, rows: list[Row]) -> Table:
    """What was measured, without columns that would be empty; of each peer the time, else the error."""
    ran = [row for row in rows if not row["skipped"]]
    ratio = _ratio if any(row["seconds"] for row in ran) else _error_ratio
    columns = dict(COLUMNS)
    for name in dict.fromkeys(name for row in ran for name in row.get("ratios", ())):
        columns[name] = functools.partial(_counted, name)
    for name in dict.fromkeys(name for row in ran for name in row["peers"]):
        columns[name] = functools.partial(ratio, name)
    cells = {name: [cell(row) for row in ran] for name, cell in columns.items()}
    shown = {name: column for name, column in cells.items() if any(column)}
    table = Table(op, list(shown), [list(row) for row in zip(*shown.values(), strict=True)], _notes(rows))
    if any(round(row["floor_share"] or 0, 2) > 1 for row in ran):
        table.notes.append(BEATEN)
    return table


def _stage(row: Row) -> tuple[str, int, str]:
    return row["axis"][0], row["scale"], row["dtype"]


def _memory_tables(op: str, axis: str, rows: list[Row]) -> list[Table]:
    """Peak extra memory of forward+backward along a series: a line per implementation, a column per point."""
    rows = [row for row in rows if row["pass"] == "forward+backward"]
    gradients = {row["axis"][1]: row["gradient_bytes"] for row in rows}
    lines, points, scale = series(rows), sorted(gradients), rows[0]["scale"]
    columns = ["implementation", *(f"{axis} {point}" for point in points)]

    def table(title: str, cell: Callable[[Peak, int], str]) -> Table:
        body = [
            [name, *(cell(values.get(p, (None, "")), gradients[p]) for p in points)]
            for name, values in lines.items()
        ]
        return Table(f"{op}: {title} over {axis}", columns, body)

    measured = table("peak extra MiB", _measured)
    measured.notes.append("of one forward+backward; in brackets, what remains after the gradients")
    measured.notes.append(f"{rows[0]['dtype']}, workspace limit {rows[0]['workspace_bytes'] / MIB:g} MiB")
    measured.notes += _notes(rows)
    if scale == 1:
        return [measured]
    measured.notes.insert(
        0, f"every length is 1/{scale} of the full case, so all memory is 1/{scale**2} of it"
    )
    return [measured, table("GiB at full size", lambda peak, _: _full_size(peak, scale))]


def _measured(peak: Peak, gradients: int) -> str:
    size, skipped = peak
    if size is None:
        return "out of memory" if skipped else ""
    if skipped:
        return f"out of memory ({size / MIB:.0f})"
    return f"{mib(size)} ({mib(max(0, size - gradients))})"


def _full_size(peak: Peak, scale: int) -> str:
    size = (peak[0] or 0) * scale**2
    if not size:
        return ""
    return f"{size / GIB:.1f}" + (f": out of memory on a {CARD // GIB} GiB card" if size > CARD else "")


def series(rows: Iterable[Row]) -> dict[str, dict[int, Peak]]:
    """Per implementation, the peak and the reason why it did not run at every point of a memory series."""
    lines: dict[str, dict[int, Peak]] = {}
    for row in rows:
        for name, found in {f"rlkernel ({row['backend']})": row, **row["peers"]}.items():
            if found["peak_extra_bytes"] or "out of memory" in found["skipped"]:
                peak = found["peak_extra_bytes"], found["skipped"]
                lines.setdefault(name, {})[row["axis"][1]] = peak
    return lines


def _notes(rows: Iterable[Row]) -> list[str]:
    """Every reason for which something did not run, said once, and everything that failed."""
    notes: dict[str, None] = {}
    for row in rows:
        for failure in row["failures"]:
            notes[f"PARITY FAILED: {row['backend']} {row['case']} {row['dtype']}: {failure}"] = None
        if row["skipped"]:
            notes[f"{row['backend']} did not run: {row['skipped']}"] = None
        for name, peer in row["peers"].items():
            if peer["note"] and not peer["skipped"]:
                notes[f"{name}: {peer['note']}"] = None
            if peer["skipped"]:
                where = f" on {row['case']}" if "out of memory" in peer["skipped"] else ""
                notes[f"{name} did not run{where}: {peer['skipped']}"] = None
    return list(notes)


def _error(row: Row) -> str:
    return ("FAILED " if row["failures"] else "") + scientific(row["error"])


def scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def spread(quartiles: Sequence[float] | None, median: float | None) -> float | None:
    """Half of what the middle half lies between, of the median; None where it was not recorded."""
    return (quartiles[1] - quartiles[0]) / 2 / median if quartiles and median else None


def _spread(row: Row) -> str:
    share = spread(row.get("seconds_quartiles"), row["seconds"])
    return "" if share is None else f"{share:.0%}"


def rate(row: Row) -> str:
    """TFLOP/s where GEMMs bound the op, GB/s where memory does."""
    if not row["seconds"]:
        return ""
    if row["flops"]:
        return f"{row['flops'] / row['seconds'] / 1e12:.3g} TFLOP/s"
    return f"{row['bytes'] / row['seconds'] / 1e9:.3g} GB/s"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:.1f}" if size < 100 * MIB else f"{size / MIB:.0f}"


def _ratio(name: str, row: Row) -> str:
    peer = row["peers"].get(name)
    if peer is None or not peer["seconds"] or not row["seconds"]:
        return ""
    return f"{peer['seconds'] / row['seconds']:.2f}x"


def _legend(rows: Sequence[Row]) -> tuple[str, ...]:
    if all(row["axis"] for row in rows):
        return ()
    if not any(row["seconds"] for row in rows):
        return LEGEND[0], ERROR_LEGEND
    said = [*LEGEND]
    said += [SPREAD_LEGEND if any(row.get("seconds_quartiles") for row in rows) else NO_SPREAD_LEGEND]
    said += [HOST_LEGEND] if any(row.get("host_seconds") for row in rows) else []
    return tuple(said)


def _error_ratio(name: str, row: Row) -> str:
    peer = row["peers"].get(name)
    if peer is None or not peer["error"] or not row["error"]:
        return ""
    return f"{peer['error']:.1e} ({peer['error'] / row['error']:.3g}x)"


def _counted(name: str, row: Row) -> str:
    return f"{row['ratios'][name]:.2f}x" if name in row.get("ratios", ()) else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": operator.itemgetter("case"),
    "dtype": operator.itemgetter("dtype"),
    "backend": operator.itemgetter("backend"),
    "pass": operator.itemgetter("pass"),
    "error": _error,
    "torch's": lambda row: scientific(row["torch_error"]),
    "ms": lambda row: milliseconds(row["seconds"]),
    "spread": _spread,
    "host ms": lambda row: milliseconds(row.get("host_seconds")),
    "rate": rate,
    "floor": lambda row: "" if row["floor_share"] is None else f"{row['floor_share']:.0%}",
    "extra MiB": lambda row: mib(row["peak_extra_bytes"]),
}


def provenance(head: dict[str, Any]) -> list[str]:
    """The lines above every table: what was run, on what, with what."""
    machine = head["machine"].get("cuda:0") if head["device"] == "cuda" else head["machine"]["cpu"]
    details = "" if head["device"] == "cuda" else f" ({head['machine']['cpu details']})"
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    commit = f"commit {head['commit']}, " if head["commit"] else ""  # none outside of a checkout
    return [
        f"{machine}{details}",
        f"{versions}; {commit}{head['date']}",
        f"$ {head['command']}",
    ]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [head, "|" + "---|" * len(columns), *lines]


def markdown(rows: Sequence[Row], head: dict[str, Any]) -> str:
    lines = ["  \n".join(f"`{line}`" for line in provenance(head)), ""]
    for table in tables(rows):
        lines += [f"**{table.title}**", "", *markdown_table(table.columns, table.rows)]
        lines += ["", *(f"- {note.strip()}" for note in table.notes), ""]
    lines += [f"- {line}" for line in _legend(rows)]
    return "\n".join(lines).rstrip() + "\n"


def text(rows: Sequence[Row], head: dict[str, Any], closing: Sequence[Table] = ()) -> str:
    """Tables in plain text, aligned, for a pipe or a file."""
    lines = [*provenance(head), ""]
    for table in tables(rows):
        lines += [table.title, table.text()]
    lines += _legend(rows)
    for table in closing:
        lines += ["", table.title, table.text().rstrip("\n")]
    return "\n".join(lines) + "\n"


def show(rows: Sequence[Row], head: dict[str, Any], stream: TextIO, closing: Sequence[Table] = ()) -> None:
    """Print the tables, and those that close the page: with rich on a terminal where it is installed."""
    if (rich := _rich(stream)) is None:
        stream.write(text(rows, head, closing))
        return
    console, new_table = rich

    def say(line: str, style: str = "dim") -> None:
        console.print(line, style=style, markup=False, highlight=False)

    def draw(table: Table) -> None:
        drawn = new_table(title=table.title, title_justify="left")
        for column in table.columns:
            drawn.add_column(column, overflow="fold")
        for cells in table.rows:
            drawn.add_row(*cells, style="red" if any("FAILED" in cell for cell in cells) else "")
        if console.measure(drawn).maximum > console.width:  # rather wrapped lines than cells cut up
            console.out("\n".join([table.title, *table.aligned()]), highlight=False)
        else:
            console.print(drawn)
        for note in table.notes:
            say(f"  {note}", style="red" if "FAILED" in note else "dim")

    for line in provenance(head):
        say(line)
    for table in tables(rows):
        draw(table)
    for line in _legend(rows):
        say(line)
    for table in closing:
        draw(table)


def _rich(stream: TextIO) -> tuple[Any, Any] | None:
    """A console, and what makes its tables: on a terminal, where the extra ``bench`` is installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        return None
    return (Console(file=stream), RichTable) if stream.isatty() else None
