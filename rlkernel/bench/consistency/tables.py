"""The report of ``consistency`` as tables, for a terminal and for docs, and what it comes to in sentences."""

import math
from collections.abc import Iterable
from typing import Any

from rlkernel.bench import render
from rlkernel.bench.consistency.pairs import MODES
from rlkernel.bench.render import Table

Stored = dict[str, Any]
Row = dict[str, Any]
DEFAULT, OURS = MODES
COST = (
    "{clock} under the mode / by default, median of interleaved pairs (in brackets: the middle half of them)"
)


def every(stored: Stored) -> list[Table]:
    found = [_operators(stored)] if stored["operators"] else []
    found += [_agreement(stored[part], part) for part in TITLES if stored[part]]
    return found + _costs(stored)


def markdown(stored: Stored) -> str:
    """For docs: where it ran, what it comes to, and the tables."""
    lines = ["  \n".join(f"`{line}`" for line in render.provenance(stored["header"])), ""]
    lines += [*(f"- {line}" for line in sentences(stored)), ""]
    for table in every(stored):
        lines += [f"**{table.title}**", "", *render.markdown_table(table.columns, table.rows), ""]
        lines += [f"- {note}" for note in table.notes] + [""] * bool(table.notes)
    return "\n".join(lines)


def text(stored: Stored) -> str:
    """For a terminal; what it comes to stands at the end."""
    lines = [*render.provenance(stored["header"]), ""]
    for table in every(stored):
        lines += [table.title, table.text()]
    return "\n".join([*lines, *sentences(stored)]) + "\n"


TITLES = {
    "models": "transformers alone: rollout behind a cache, and trainer on whole sequences",
    "engines": "vLLM as the rollout, transformers as the trainer",
}


def _agreement(rows: list[Row], part: str) -> Table:
    columns = ["model", "dtype", "tokens"]
    for mode in MODES:
        columns += [f"{what}, {mode}" for what in ("bit-equal", "max abs difference", "KL k1", "KL k3")]
    body = []
    for row in rows:
        cells = [row["family"], row["dtype"], f"{row[DEFAULT]['tokens']:,}"]
        for mode in MODES:
            found = row[mode]
            if "refused" in found:
                cells += ["refused", "", "", ""]
            else:
                cells += [f"{found['equal']:,}"]
                cells += [_number(found[key]) for key in ("max_abs_difference", "k1", "k3")]
        body.append(cells)
    notes = {
        f"{row['family']}: {row[mode]['refused']}": None
        for row in rows
        for mode in MODES
        if "refused" in row[mode]
    }
    return Table(TITLES[part], columns, body, list(notes))


def _cost(stored: Stored) -> str:
    return COST.format(clock=stored["settings"]["clock"])


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"


def _costs(stored: Stored) -> list[Table]:
    found = []
    for part, title in (("models", "what it costs"), ("engines", "what it costs in vLLM")):
        rows = [row for row in stored[part] if row.get("cost")]
        if rows:
            labels = list(rows[0]["cost"])
            body = [[row["family"], row["dtype"], *(_ratio(row["cost"][x]) for x in labels)] for row in rows]
            found.append(Table(f"{title}: {_cost(stored)}", ["model", "dtype", *labels], body))
    return found


def _ratio(cost: Row) -> str:
    low, high = cost["ratio_quartiles"]
    return f"{cost['ratio']:.2f} ({low:.2f}-{high:.2f})"


def _operators(stored: Stored) -> Table:
    """Of calls that are timed the numbers of rows are columns."""
    rows = stored["operators"]
    counts = sorted({label for row in rows for label in row["cost"]}, key=int)
    columns = ["operator", "shape", "dtype", *(f"{mode}: batch sizes with equal bits" for mode in MODES)]
    columns += [f"{count} row{'s' * (count != '1')}" for count in counts]
    body = []
    for row in rows:
        cells = [row["name"], row["shape"], row["dtype"], *(_equal_sizes(row[mode]) for mode in MODES)]
        body.append(cells + [_ratio(row["cost"][x]) if x in row["cost"] else "" for x in counts])
    return Table(
        f"operators: {_cost(stored)}",
        columns,
        body,
        ["sample: torch's is multinomial, whose draws follow the batch"],
    )


def _equal_sizes(found: Row) -> str:
    return f"{found['sizes'] - len(found['changed_sizes'])} of {found['sizes']}"


def sentences(stored: Stored) -> list[str]:
    """What a person takes home."""
    lines = []
    for part, who in (("models", "transformers alone"), ("engines", "vLLM and transformers")):
        rows = [row for row in stored[part] if "refused" not in row[OURS]]
        if rows:
            families = len(dict.fromkeys(row["family"] for row in rows))
            dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
            lines.append(
                f"{who}, {families} model families in {dtypes}: by default {_agreed(rows, DEFAULT)}; "
                f"under batch_invariant {_agreed(rows, OURS)}."
            )
    for part, what in (("models", "it costs"), ("engines", "in vLLM it costs")):
        rows = [row["cost"] for row in stored[part] if row.get("cost")]
        if rows:
            costs = (f"{label} {_mean(row[label]['ratio'] for row in rows):.2f}" for label in rows[0])
            lines.append(f"{what}, times the default, geometric mean: {', '.join(costs)}.")
    if rows := stored["operators"]:
        stable = {mode: sum(not row[mode]["changed_sizes"] for row in rows) for mode in MODES}
        lines.append(
            f"operators whose rows have the same bits in every batch size: by default {stable[DEFAULT]} of "
            f"{len(rows)}, under batch_invariant {stable[OURS]}."
        )
    refused = {
        row["family"] for part in ("models", "engines") for row in stored[part] if "refused" in row[OURS]
    }
    if refused:
        lines.append(f"refused by name, so that nothing is promised: {', '.join(sorted(refused))}.")
    return lines


def _agreed(rows: list[Row], mode: str) -> str:
    equal, tokens = (sum(row[mode][key] for row in rows) for key in ("equal", "tokens"))
    far = max(row[mode]["max_abs_difference"] for row in rows)
    k3 = max(row[mode]["k3"] for row in rows)
    return f"{equal:,} of {tokens:,} tokens are bit-equal, max |difference| {_number(far)}, KL {_number(k3)}"


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def broken(stored: Stored) -> list[str]:
    """Where the promise does not hold."""
    found = [
        f"{row['name']} {row['dtype']}: rows have other bits in batches of {row[OURS]['changed_sizes']}"
        for row in stored["operators"]
        if row[OURS]["changed_sizes"]
    ]
    for part in ("models", "engines"):
        for row in stored[part]:
            ours = row[OURS]
            if "refused" not in ours and ours["equal"] != ours["tokens"]:
                found.append(
                    f"{row['family']} {row['dtype']}: {ours['tokens'] - ours['equal']} of {ours['tokens']} "
                    f"log-probabilities differ, by up to {ours['max_abs_difference']:.1e}"
                )
    return found
