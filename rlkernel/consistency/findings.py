"""What ``trace`` found: the modules that differ, the first of them, and who is to blame."""

from dataclasses import dataclass
from typing import NamedTuple

from rlkernel.consistency.fingerprints import Distance

SHOWN = 18  # modules of the printed table


class Difference(NamedTuple):
    """An output of a module that differs.

    ``inputs_equal`` is None where no input could be compared, ``weights_equal`` where weights of equal shapes
    are missing.  ``place`` is the first row that differs: its index in the output without its last dimension,
    or in what the row mapping gave.
    """

    module: str
    kind: str  # the module's class
    call: int  # 0 unless a module is called more than once
    output: str  # which tensor of the output; empty where it is one
    inputs_equal: bool | None
    inputs_compared: int
    weights_equal: bool | None
    place: tuple[int, ...]
    distance: Distance


@dataclass(frozen=True)
class Trace:
    """The outputs of modules of equal names, in the order in which the first run made them.

    ``print(trace)`` shows the verdict and the chain of modules that differ.
    """

    differences: tuple[Difference, ...]
    compared: int  # outputs
    unmatched: tuple[str, ...]  # calls that only one run made
    incomparable: tuple[str, ...]  # outputs that have other shapes, with both
    verdict: str

    @property
    def identical(self) -> bool:
        """Whether no output differs, and one was compared."""
        return self.compared > 0 and not self.differences

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        lines = [self.verdict]
        lines.append(f"{self.compared:,} outputs compared, {len(self.differences):,} differ")
        for name, what in (("only in one run", self.unmatched), ("not comparable", self.incomparable)):
            if what:
                more = f", and {len(what) - 2} more" if len(what) > 2 else ""
                lines.append(f"{name}: {', '.join(what[:2])}{more}")
        if self.differences:
            lines += _table(self.differences)
        return "\n".join(lines)


def _table(differences: tuple[Difference, ...]) -> list[str]:
    rows = [("module", "inputs", "weights", "rows", "first at", "ULPs", "difference")]
    for x in differences[:SHOWN]:
        d = x.distance
        about = "" if d.exact else ">= "
        rows.append(
            (
                label(x.module, x.call, x.output),
                _word(x.inputs_equal),
                _word(x.weights_equal),
                f"{d.differ:,} of {d.rows:,}",
                ", ".join(map(str, x.place)),
                "" if d.ulps is None else f"{about}{d.ulps:,}",
                "" if d.difference is None else f"{about}{d.difference:.3g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    if len(differences) > SHOWN:
        lines.append(f"and {len(differences) - SHOWN:,} more")
    return lines


def _word(equal: bool | None) -> str:
    return "?" if equal is None else "equal" if equal else "differ"


def label(module: str, call: int = 0, output: str = "") -> str:
    """The whole model has no name of its own."""
    name = module or "(model)"
    return name + (f"#{call}" if call else "") + (f"[{output}]" if output else "")
