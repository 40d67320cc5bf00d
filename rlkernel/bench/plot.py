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
    largest = max(peak or 0 for values in lines.values() for peak, _ in values.values())
    unit, label = (GIB, "GiB") if largest >= 4 * GIB else (MIB, "MiB")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, values in lines.items():
        points = sorted(point for point, (peak, _) in values.items() if peak)
        drawn = axes.plot(
            points, [(values[p][0] or 0) / unit for p in points], "o-" if name.startswith("rlkernel") else "s--", label=name
        )
        for point in (p for p in points if values[p][1]):
            axes.annotate(
                "out of memory",
                (point, (values[point][0] or 0) / unit),
                color=drawn[0].get_color(),
                ha="right",
                va="bottom",
            )
    scale = rows[0]["scale"]
    axes.set_xlabel(axis)
    axes.set_xticks(sorted({row["axis"][1] for row in rows}))
    axes.set_ylabel(f"peak extra memory, forward + backward ({label})")
    axes.set_ylim(bottom=0)
    title = f"{rows[0]['op']}, {rows[0]['dtype']}"
    axes.set_title(title + (f", every length 1/{scale}: memory 1/{scale**2} of the full case" if scale > 1 else ""))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
