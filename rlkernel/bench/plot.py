"""``--plot``: peak extra memory over a series of sizes, one line per implementation."""

from collections.abc import Sequence

from rlkernel.bench.cases import UsageError
from rlkernel.bench.render import GIB, MIB, series
from rlkernel.bench.run import Row


def save(path: str, rows: Sequence[Row]) -> None:
    """Draw forward+backward memory of the rows' first series into ``path``.

    Raises:
        UsageError: matplotlib is missing.
    """
    rows = [row for row in rows if row["axis"] and row["pass"] == "forward+backward"]
    try:
        import matplotlib

        matplotlib.use("Agg")  # a server has no display
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError(f"--plot must have matplotlib (pip install rlkernel[bench]), got {error}") from error

    axis = rows[0]["axis"][0]
    rows = [row for row in rows if row["axis"][0] == axis]
    lines = series(rows)
    points = sorted({row["axis"][1] for row in rows})
    smallest = min(peak for values in lines.values() for peak, _ in values.values() if peak)
    unit, label = (GIB, "GiB") if smallest >= GIB else (MIB, "MiB")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, values in lines.items():
        peaks = {point: peak / unit for point, (peak, _) in sorted(values.items()) if peak}
        style = "o-" if name.startswith("rlkernel") else "s--"
        drawn = axes.plot(list(peaks), list(peaks.values()), style, label=name)
        for point in (point for point in peaks if values[point][1]):  # foreseen, not run
            colour = drawn[0].get_color()
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
    axes.set_title(
        title + (f", every length 1/{scale}: memory 1/{scale**2} of the full case" if scale > 1 else "")
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
