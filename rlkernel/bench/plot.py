"""``--plot``: time and memory beside the best peer's as bars, or peak extra memory over a series as lines."""

from collections.abc import Callable, Sequence
from typing import Any

from rlkernel.bench import summary
from rlkernel.bench.cases import UsageError
from rlkernel.bench.render import GIB, MIB, series
from rlkernel.bench.run import Row
from rlkernel.bench.summary import Best

_ROOM = 0.4  # for the words beside the longest bar, of the logarithms that the bars take
OURS, PEERS, WORSE = "#1f6f8b", "#c0c4c8", "#c8553d"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def pyplot() -> Any:
    """Matplotlib without a display.

    Raises:
        UsageError: it is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as found
    except ImportError as error:
        raise UsageError(f"--plot must have matplotlib (pip install rlkernel[bench]), got {error}") from error
    return found


def save(path: str, rows: Sequence[Row], title: str = "") -> None:
    """Draw what ``rows`` hold into ``path``: bars where something was timed or there is no series.

    Raises:
        UsageError: matplotlib is missing, or there is nothing to draw, or ``path`` is no picture.
    """
    plt = pyplot()
    staged = [row for row in rows if row["axis"] and row["pass"] == "forward+backward"]
    if any(row["seconds"] for row in rows) or not staged:
        figure = bars(plt, rows)
        figure.suptitle(title, fontsize=9)
    else:
        figure = lines(plt, staged)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot must be a picture that can be written, got {path}: {error}") from error
    finally:
        plt.close(figure)


def bars(plt: Any, rows: Sequence[Row]) -> Any:
    """One line for every op, case and pass: the best peer's time over ours, and both memories."""
    found = [each for each in summary.best(rows) if each.ratio is not None or each.peer_bytes is not None]
    panels: list[Callable[[Any, list[Best]], None]] = []
    if any(each.ratio is not None for each in found):
        panels.append(_speed)
    if any(each.peer_bytes is not None for each in found):
        panels.append(_memory)
    if not panels:
        raise UsageError("--plot must have a case that ran beside a peer, got none")
    size = (3.2 + 4.2 * len(panels), 1.4 + 0.27 * len(found))
    figure, axes = plt.subplots(
        1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis, found)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0][0].set_yticks(range(len(found)), _labels(found), fontsize=8)
    axes[0][0].set_ylim(len(found) - 0.4, -0.6)  # the first on top
    return figure


def _labels(found: list[Best]) -> list[str]:
    """The op and the pass; dtype and sizes only where an op has several, or labels would fill the page."""
    labels = []
    for each in found:
        row = each.row
        same = [other.row for other in found if other.row["op"] == row["op"]]
        parts = [row["op"]]
        if len({other["dtype"] for other in same}) > 1:
            parts.append(DTYPES[row["dtype"]])
        if len({other["case"] for other in same}) > 1:
            parts.append(row["case"])
        labels.append(f"{' '.join(parts)}, {summary.PASSES[row['pass']]}")
    return labels


def _speed(axis: Any, found: list[Best]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    raced = [each.between for each in found if each.ratio is not None]
    left, right = min(0.9, min(raced)[0] / 1.15), max(2.0, max(high for _, high in raced))
    axis.set_xscale("log", base=2)
    for at, each in enumerate(found):
        ratio = each.ratio
        if ratio is None:
            continue
        low, high = each.between
        # a bar that begins at 1 and not at the edge: which way it points is what is to be seen
        axis.barh(at, ratio - 1, left=1, height=0.62, color=OURS if ratio >= 1 else WORSE)
        axis.plot([low, high], [at, at], color="black", linewidth=1)
        axis.text(max(high, 1.0) * 1.04, at, f"{ratio:.2f}x {each.rival}", va="center", fontsize=7)
    axis.set_xlim(left, right * (right / left) ** _ROOM)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x" if value >= 1 else f"1/{1 / value:g}x")
    axis.set_xlabel("time of the best peer / ours (line: middle half of the rounds)", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)


def _memory(axis: Any, found: list[Best]) -> None:
    pairs = [(each.row["peak_extra_bytes"] or 0, each.peer_bytes) for each in found]
    least = min((size for pair in pairs for size in pair if size), default=MIB)
    edge = max(2**-10 * MIB, least / 2)  # where an empty bar ends: a logarithm has no 0
    largest = edge
    for at, (each, (own, peer)) in enumerate(zip(found, pairs, strict=True)):
        if peer is None:
            continue
        largest = max(largest, own, peer)
        worse = own > 1.02 * peer  # not the rounding of a block
        axis.barh(at - 0.17, max(own, edge) / MIB, height=0.32, color=WORSE if worse else OURS)
        axis.barh(at + 0.17, max(peer, edge) / MIB, height=0.32, color=PEERS)
        words = f"{_amount(own)} / {_amount(peer)} {each.spared}"
        axis.text(max(own, peer, edge) / MIB * 1.15, at, words, va="center", fontsize=7)
    axis.set_xscale("log")
    largest = max(largest, 10 * edge)
    axis.set_xlim(edge / MIB, largest / MIB * (largest / edge) ** _ROOM)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("peak extra MiB: ours (colour), least of a peer (grey)", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)


def _amount(size: int) -> str:
    return "0" if not size else f"{size / MIB:.2g}" if size < 100 * MIB else f"{size / MIB:.0f}"


def lines(plt: Any, rows: Sequence[Row]) -> Any:
    """Forward+backward memory of the rows' first series."""
    axis = rows[0]["axis"][0]
    rows = [row for row in rows if row["axis"][0] == axis]
    drawn = series(rows)
    points = sorted({row["axis"][1] for row in rows})
    smallest = min(peak for values in drawn.values() for peak, _ in values.values() if peak)
    unit, label = (GIB, "GiB") if smallest >= GIB else (MIB, "MiB")
    figure, axes = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    for name, values in drawn.items():
        peaks = {point: peak / unit for point, (peak, _) in sorted(values.items()) if peak}
        style = "o-" if name.startswith("rlkernel") else "s--"
        line = axes.plot(list(peaks), list(peaks.values()), style, label=name)
        for point in (point for point in peaks if values[point][1]):  # foreseen, not run
            colour = line[0].get_color()
            axes.annotate("out of memory", (point, peaks[point]), color=colour, ha="right", va="bottom")
    scale = rows[0]["scale"]
    if points[-1] > 16 * points[0]:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(axis)
    axes.set_xticks(points, [str(point) for point in points])
    axes.set_ylabel(f"peak extra memory, forward + backward ({label})")
    axes.set_yscale("log", base=2)  # the lines are orders of magnitude apart
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    title = f"{rows[0]['op']}, {rows[0]['dtype']}"
    figure.suptitle(
        title + (f", every length 1/{scale}: memory 1/{scale**2} of the full case" if scale > 1 else "")
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # on no line
    return figure
