"""The report of ``examples/grpo_prefix.py`` as a table for ``readme``: a step of TRL, three ways."""

from collections.abc import Iterable
from typing import Any

from rlkernel.bench import render

MODES = {"stock": "stock TRL", "head": "`patch_trl()`", "packed": "`prefix_sharing=True`"}
MEASURED = {
    "step, s": ("step_seconds", "{:.2f}"),
    "of it the reference pass, s": ("reference_seconds", "{:.2f}"),
    "CPU time of the step, s": ("cpu_seconds", "{:.2f}"),
    "peak extra memory, MiB": ("peak_mib", "{:.0f}"),
}
COUNTED = {"tokens": "token_ratio", "FLOPs": "flop_ratio", "FLOPs without the head": "body_ratio"}


def markdown(stored: dict[str, Any]) -> str:
    settings = stored["settings"]
    left = sum(stored["packed"]["fallbacks"].values())
    return page(
        stored,
        f"A step of `GRPOTrainer` without generation: {settings['groups']} group(s), "
        f"P={settings['prompt']}, L={settings['completion']}, G={settings['group']}, "
        f"{settings.get('dtype', 'fp32')}, {settings['layers']} layers of {settings['hidden']}, "
        f"V={settings['vocabulary']}.",
        ["", *MODES.values(), "stock / packed"],
        measured(stored, MODES, MEASURED)
        + [[label, "", "", "", f"{stored[key]:.1f}x"] for label, key in COUNTED.items()],
        f"largest difference of a logprob in the first step: {stored['logprob_difference']:.1e}; "
        f"passes left to TRL: {left}",
        spread_of(stored, MODES),
    )


def measured(
    stored: dict[str, Any], modes: Iterable[str], wanted: dict[str, tuple[str, str]]
) -> list[list[str]]:
    """What each mode took, and the first one's over the last one's."""
    rows = []
    for label, (key, form) in wanted.items():
        cells = [_cell(stored[mode], key, form) for mode in modes]
        values = [stored[mode]["summary"][key] for mode in modes]
        rows.append([label, *cells, f"{values[0] / values[-1]:.1f}x"])
    return rows


def _cell(record: dict[str, Any], key: str, form: str) -> str:
    """The median, and what the steps lie between where they were kept one by one."""
    value = form.format(record["summary"][key])
    if not isinstance(steps := record.get(key), list) or len(steps) < 2:
        return value
    return f"{value} ({form.format(min(steps[1:]))} to {form.format(max(steps[1:]))})"


def spread_of(stored: dict[str, Any], modes: Iterable[str]) -> str:
    counts = {len(steps) - 1 for mode in modes for steps in stored[mode].values() if _is_series(steps)}
    return (
        f"times are medians of {' or '.join(map(str, sorted(counts)))} measurements after one that warms up; "
        "in brackets the least and the most"
    )


def _is_series(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def page(stored: dict[str, Any], about: str, columns: list[str], rows: list[list[str]], *notes: str) -> str:
    head = "  \n".join(f"`{line}`" for line in render.provenance(stored["header"]))
    table = render.markdown_table(columns, rows)
    return "\n".join([head, "", about, "", *table, "", *(f"- {note}" for note in notes), ""])
