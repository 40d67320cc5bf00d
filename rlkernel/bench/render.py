"""Rows as tables: for a terminal, for Markdown. What is compared with what is written above each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rlkernel.bench.run import Row

MIB, GIB = 2**20, 2**30
LEGEND = (
    "error: largest deviation of an output from fp64; for forward+backward, relative error of the worst gradient.",
    "peer columns: the peer's time divided by ours (2.0x: we are twice as fast); 'floor': least possible time / time.",
)
MEMORY_LEGEND = "peak extra memory of one forward+backward, in MiB, gradients of {gradients:.0f}-{most:.0f} MiB included."


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table per op, and one per series of memory cases."""
    made = []
    for op in dict.fromkeys(row["op"] for row in rows):
        own = [row for row in rows if row["op"] == op]
        if plain := [row for row in own if row["axis"] is None]:
            made.append(_op_table(op, plain))
        series = [row for row in own if row["axis"] is not None]
        for axis in dict.fromkeys(row["axis"][0] for row in series):
            made.append(_memory_table(op, axis, [row for row in series if row["axis"][0] == axis]))
    return made


def _op_table(op: str, rows: list[Row]) -> Table:
    ran = [row for row in rows if not row["skipped"]]
    peers = [p for p in _peers(rows) if any(row["seconds"] and row["peers"][p]["seconds"] for row in ran if p in row["peers"])]
    head = ["case", "dtype", "backend", "pass", "error", "torch's", "ms", "rate", "floor", "extra MiB", *peers]
    body = []
    for row in ran:
        cells = [row["case"], row["dtype"], row["backend"], row["pass"], _error(row), _scientific(row["torch_error"])]
        cells += [_ms(row["seconds"]), rate(row), _percent(row["floor_share"]), _mib(row["peak_extra_bytes"])]
        body.append(cells + [_ratio(row, row["peers"].get(peer)) for peer in peers])
    shown = [i for i in range(len(head)) if i < 4 or any(cells[i] for cells in body)]
    table = Table(op, [head[i] for i in shown], [[cells[i] for i in shown] for cells in body])
    table.notes = _notes(rows)
    return table


def _memory_table(op: str, axis: str, rows: list[Row]) -> Table:
    """Peak extra memory of forward+backward along a series: one line per implementation, one column per point."""
    rows = [row for row in rows if row["pass"] == "forward+backward"]
    points = sorted({row["axis"][1] for row in rows})
    scale = rows[0]["scale"]
    lines = series(rows)
    columns = ["implementation", *(f"{axis} {point}" for point in points)]
    body = [[name, *(_point(values.get(point)) for point in points)] for name, values in lines.items()]
    gradients = [row["gradient_bytes"] / MIB for row in rows]
    table = Table(f"{op}: memory over {axis}", columns, body)
    table.notes.append(MEMORY_LEGEND.format(gradients=min(gradients), most=max(gradients)))
    table.notes.append(f"workspace limit {rows[0]['workspace_bytes'] / MIB:g} MiB, {rows[0]['dtype']}")
    if scale > 1:
        table.notes.append(
            f"every length is 1/{scale} of the full case, so all memory is 1/{scale**2} of it; at full size, in GiB:"
        )
        for name, values in lines.items():
            full = [f"{peak * scale**2 / GIB:.1f}" + _card(peak * scale**2) for p in points for peak, _ in [values[p]] if peak]
            table.notes.append(f"  {name}: {', '.join(full)}")
    table.notes += _notes(rows)
    return table


CARD = 80 * GIB


def _card(size: float) -> str:
    return " (out of memory on an 80 GiB card)" if size > CARD else ""


def series(rows: Iterable[Row]) -> dict[str, dict[int, tuple[int | None, str]]]:
    """Per implementation, the peak and the reason why it did not run at every point of a memory series."""
    lines: dict[str, dict[int, tuple[int | None, str]]] = {}
    for row in rows:
        point = row["axis"][1]
        ours = f"rlkernel ({row['backend']})"
        if row["peak_extra_bytes"] or "out of memory" in row["skipped"]:
            lines.setdefault(ours, {})[point] = (row["peak_extra_bytes"], row["skipped"])
        for name, peer in row["peers"].items():
            if peer["peak_extra_bytes"] or "out of memory" in peer["skipped"]:
                lines.setdefault(name, {})[point] = (peer["peak_extra_bytes"], peer["skipped"])
    return lines


def _point(value: tuple[int | None, str] | None) -> str:
    if value is None:
        return ""
    peak, skipped = value
    if skipped:
        return f"out of memory ({peak / MIB:.0f})" if peak else "out of memory"
    return _mib(peak)


def _peers(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["peers"]))


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
                notes[f"{name} did not run{_where(peer['skipped'], row)}: {peer['skipped']}"] = None
    return list(notes)


def _where(reason: str, row: Row) -> str:
    return f" on {row['case']}" if "out of memory" in reason else ""


def _error(row: Row) -> str:
    return ("FAILED " if row["failures"] else "") + _scientific(row["error"])


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def rate(row: Row) -> str:
    """TFLOP/s where GEMMs bound the op, GB/s where memory does."""
    if not row["seconds"]:
        return ""
    if row["flops"]:
        return f"{row['flops'] / row['seconds'] / 1e12:.3g} TFLOP/s"
    return f"{row['bytes'] / row['seconds'] / 1e9:.3g} GB/s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:.1f}" if size < 100 * MIB else f"{size / MIB:.0f}"


def _ratio(row: Row, peer: dict[str, Any] | None) -> str:
    if peer is None or not peer["seconds"] or not row["seconds"]:
        return ""
    return f"{peer['seconds'] / row['seconds']:.2f}x"


def provenance(head: dict[str, Any]) -> list[str]:
    """The lines above every table: what was run, on what, with what."""
    machine = head["machine"].get("cuda:0") if head["device"] == "cuda" else head["machine"]["cpu"]
    details = "" if head["device"] == "cuda" else f" ({head['machine']['cpu details']})"
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return [f"{machine}{details}", f"{versions}; commit {head['commit']}, {head['date']}", f"$ {head['command']}"]


def markdown(rows: Sequence[Row], head: dict[str, Any]) -> str:
    lines = ["  \n".join(f"`{line}`" for line in provenance(head)), ""]
    for table in tables(rows):
        lines += [f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(cells) + " |" for cells in table.rows]
        lines += ["", *(f"- {note.strip()}" for note in table.notes), ""]
    lines += list(LEGEND) if any(row["seconds"] for row in rows) else []
    return "\n".join(lines).rstrip() + "\n"


def text(rows: Sequence[Row], head: dict[str, Any]) -> str:
    """Tables in plain text, aligned, for a pipe or a file."""
    lines = [*provenance(head), ""]
    for table in tables(rows):
        lines += [table.title, *_aligned([table.columns, *table.rows]), *(f"  {note}" for note in table.notes), ""]
    return "\n".join([*lines, *LEGEND]) + "\n"


def _aligned(grid: list[list[str]]) -> list[str]:
    widths = [max(len(cells[i]) for cells in grid) for i in range(len(grid[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in grid]


def show(rows: Sequence[Row], head: dict[str, Any], stream: TextIO) -> None:
    """Print the tables: with rich on a terminal where it is installed, else as text."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:  # the extra `bench` is not installed
        stream.write(text(rows, head))
        return
    if not stream.isatty():
        stream.write(text(rows, head))
        return
    console = Console(file=stream)
    for line in provenance(head):
        console.print(line, style="dim", markup=False, highlight=False)
    for table in tables(rows):
        drawn = RichTable(title=table.title, title_justify="left")
        for column in table.columns:
            drawn.add_column(column, overflow="fold")
        for cells in table.rows:
            drawn.add_row(*cells, style="red" if any("FAILED" in cell for cell in cells) else "")
        console.print(drawn)
        for note in table.notes:
            console.print(f"  {note}", style="red" if "FAILED" in note else "dim", markup=False, highlight=False)
    for line in LEGEND:
        console.print(line, style="dim", markup=False, highlight=False)
