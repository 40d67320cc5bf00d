"""The end of a run in a few lines: per op the best backend, the best peer's time over ours, memory, error."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkernel.bench import render
from rlkernel.bench.render import Table
from rlkernel.bench.run import Row

ORACLE = "reference"
PASSES = {"forward": "fwd", "forward+backward": "fwd+bwd"}
LEGEND = (
    "peer/ours: time of the best peer over ours; MiB: peak extra memory, and the least of a peer; "
    "torch's: error of plain PyTorch",
    "a range is that of several cases; spread: the widest, of the ratios or else of our times",
)


@dataclass(frozen=True)
class Best:
    """The fastest backend that is right on one case and pass, and the peers that it is held against."""

    row: Row
    rival: str | None  # the fastest peer
    spared: str | None  # the peer that takes least memory

    @property
    def ratio(self) -> float | None:
        """The rival's time over ours."""
        return None if self.rival is None else self.row["peers"][self.rival]["seconds"] / self.row["seconds"]

    @property
    def ratio_quartiles(self) -> list[float] | None:
        """What the middle half of the rounds says of the ratio, where it was recorded."""
        return None if self.rival is None else self.row["peers"][self.rival].get("ratio_quartiles")

    @property
    def between(self) -> tuple[float, float]:
        """What the ratio is known to lie between; what straddles 1 is neither faster nor slower."""
        ratio = self.ratio or 0.0
        low, high = self.ratio_quartiles or (ratio, ratio)
        return min(low, ratio), max(high, ratio)

    @property
    def peer_bytes(self) -> int | None:
        return None if self.spared is None else self.row["peers"][self.spared]["peak_extra_bytes"]

    @property
    def label(self) -> str:
        return f"{self.row['op']} {self.row['case']} {self.row['dtype']}"


def without_oracle(rows: Iterable[Row]) -> list[Row]:
    """``rows`` without those of the reference, where another backend ran the same."""
    rows = list(rows)
    run = {_call(row) for row in rows if row["backend"] != ORACLE and not row["skipped"]}
    return [row for row in rows if row["backend"] != ORACLE or _call(row) not in run]


def _interpreted(row: Row) -> bool:
    """A kernel of Triton on a CPU, of which parity alone is known, on a case that is its own."""
    return row["backend"].endswith("(interpreter)")


def _call(row: Row) -> tuple[Any, ...]:
    return row["op"], row["case"], row["dtype"], row["pass"]


def best(rows: Sequence[Row]) -> list[Best]:
    """One for every op, case, dtype and pass that ran, in the order of the rows; series are left out."""
    able = [row for row in rows if row["axis"] is None and not row["skipped"] and not row["failures"]]
    here = {row["op"] for row in able if not _interpreted(row)}
    able = [row for row in able if not (_interpreted(row) and row["op"] in here)]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in without_oracle(able):
        groups.setdefault(_call(row), []).append(row)
    return [_best(group) for group in groups.values()]


def _best(group: list[Row]) -> Best:
    timed = [row for row in group if row["seconds"]]
    preferred = next((row for row in group if row["preferred"]), group[0])
    row = min(timed, key=lambda row: row["seconds"]) if timed else preferred
    peers = {name: peer for name, peer in row["peers"].items() if not peer["bare"] and not peer["skipped"]}

    def least(what: str) -> str | None:
        known = {name: peer[what] for name, peer in peers.items() if peer[what] is not None}
        return min(known, key=lambda name: known[name]) if known else None

    return Best(row, least("seconds") if row["seconds"] else None, least("peak_extra_bytes"))


def table(rows: Sequence[Row]) -> Table:
    """A line for every op and pass; columns that would be empty are left out."""
    groups: dict[tuple[str, str], list[Best]] = {}
    for found in best(rows):
        groups.setdefault((found.row["op"], found.row["pass"]), []).append(found)
    cells = {name: [cell(group) for group in groups.values()] for name, cell in COLUMNS.items()}
    shown = {name: column for name, column in cells.items() if any(column)}
    lines = [list(row) for row in zip(*shown.values(), strict=True)]
    return Table("summary", list(shown), lines, [*_notes(rows), *LEGEND])


def _notes(rows: Sequence[Row]) -> list[str]:
    found = best(rows)
    notes = [
        f"PARITY FAILED: {row['backend']} {row['op']} {row['case']} {row['dtype']}: {failure}"
        for row in rows
        for failure in row["failures"]
    ]
    raced = [each for each in found if each.ratio is not None]
    slower = [each for each in raced if each.between[1] < 1]
    if raced:
        faster = sum(each.between[0] > 1 for each in raced)
        level = len(raced) - faster - len(slower)
        note = (
            f"faster than the best peer in {faster} of {len(raced)} cases and passes, slower in {len(slower)}"
        )
        notes.append(note + (f", within the spread of it in {level}" if level else ""))
    for each in slower:
        notes.append(f"slower: {each.label} {each.row['pass']}: {each.ratio:.2f}x of {each.rival}")
    for each in found:
        if each.row["seconds"] and not each.row["preferred"]:
            notes.append(f"not what a call takes by itself: {each.row['backend']} for {each.label}")
    return notes


def _range(values: Iterable[float | None], form: Callable[[Any], str]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    low, high = form(known[0]), form(known[-1])
    return low if low == high else f"{low}-{high}"


def _names(names: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(name for name in names if name))


def _ratio(group: list[Best]) -> str:
    return _range((each.ratio for each in group), lambda ratio: f"{ratio:.2f}x")


def _spread(group: list[Best]) -> str:
    """Of the ratio where there is one, else of our time: the widest of the cases."""
    shares = [render.spread(each.ratio_quartiles, each.ratio) for each in group]
    shares += [render.spread(each.row.get("seconds_quartiles"), each.row["seconds"]) for each in group]
    known = [share for share in shares if share is not None]
    return f"{max(known):.0%}" if known else ""


def _worst(group: list[Best]) -> Row:
    """The case whose error is largest beside PyTorch's own."""

    def share(row: Row) -> float:
        return (row["error"] or 0.0) / row["torch_error"] if row["torch_error"] else row["error"] or 0.0

    return max((each.row for each in group), key=share)


COLUMNS: dict[str, Callable[[list[Best]], str]] = {
    "op": lambda group: group[0].row["op"],
    "pass": lambda group: PASSES[group[0].row["pass"]],
    "backend": lambda group: _names(each.row["backend"] for each in group),
    "ms": lambda group: _range((each.row["seconds"] for each in group), render.milliseconds),
    "best peer": lambda group: _names(each.rival for each in group),
    "peer/ours": _ratio,
    "spread": _spread,
    "MiB": lambda group: _range((each.row["peak_extra_bytes"] for each in group), render.mib),
    "peer MiB": lambda group: _range((each.peer_bytes for each in group), render.mib),
    "error": lambda group: render.scientific(_worst(group)["error"]),
    "torch's": lambda group: render.scientific(_worst(group)["torch_error"]),
}
