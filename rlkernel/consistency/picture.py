"""``Report.plot``: three panels, in HTML that needs no package, or by matplotlib."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlkernel.consistency.report import TAIL_SHARES, Report

_WIDTH, _HEIGHT, _EDGE = 420, 320, 56  # of a panel, and what its labels take


class Panel(NamedTuple):
    """``lines``: (name, x, y).  ``ticks``: where the x axis has which label; empty: at round numbers."""

    title: str
    x: str
    y: str
    kind: str  # points, bars or lines
    lines: list[tuple[str, list[float], list[float]]]
    ticks: list[tuple[float, str]]


def save(report: Report, path: str | Path) -> None:
    """Draw the report into a file, as its suffix says.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: the suffix is not .html, and matplotlib is missing.
    """
    if not report.compared:
        raise ValueError("a report that is drawn must have a compared token, got none")
    path = Path(path)
    panels = (_scatter(report), _histogram(report), _tails(report))
    if path.suffix.lower() in (".html", ".htm"):
        path.write_text(_page(report, panels), encoding="utf-8")
    else:
        _matplotlib(path, panels)


def _scatter(report: Report) -> Panel:
    train, rollout = report.points.train.tolist(), report.points.rollout.tolist()
    name = f"every token ({len(train):,})" if len(train) == report.compared else f"{len(train):,} tokens"
    return Panel("log-probabilities", "rollout", "train", "points", [(name, rollout, train)], [])


def _histogram(report: Report) -> Panel:
    counts = report.ulp_histogram
    last = max(k for k, n in enumerate(counts) if n)
    labels = [(float(k), str(k) if k < 2 else f"2^{k - 1}") for k in range(last + 1)]
    places = [float(k) for k in range(last + 1)]
    shares = [n / report.compared for n in counts[: last + 1]]
    return Panel(
        "units in the last place", "apart, from", "share of tokens", "bars", [("", places, shares)],
        labels[:: 1 + last // 9],
    )  # fmt: skip


def _tails(report: Report) -> Panel:
    """How large a share of tokens has a ratio beyond which one, on either side."""
    shares = [math.log10(share / 100) for share in TAIL_SHARES]
    middle = len(shares) - 1
    low, high = report.tails[: middle + 1], report.tails[middle:]
    # a share below one token of all has none behind it
    seen = [k for k, share in enumerate(TAIL_SHARES) if share / 100 * report.compared >= 1] or [0]
    x = [shares[k] for k in seen]
    lines = [
        ("below", x, [math.exp(min(low[middle - k], 700.0)) for k in seen]),
        ("above", x, [math.exp(min(high[k], 700.0)) for k in seen]),
    ]
    ticks = [(float(k), f"{10.0 ** (k + 2):g}%") for k in range(-7, 0) if k >= x[-1] - 0.5]
    return Panel("ratio train / rollout", "share of tokens beyond", "ratio", "lines", lines, ticks)


def _matplotlib(path: Path, panels: Sequence[Panel]) -> None:
    try:
        from matplotlib.figure import Figure  # without pyplot: neither a display nor global state
    except ImportError as error:
        raise ImportError(
            f"a plot in {path.suffix or 'a file without suffix'} must have matplotlib (pip install "
            f"rlkernel[bench]), which .html does without, got {error}"
        ) from error
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, x, y in panel.lines:
            if panel.kind == "points":
                low, high = min(*x, *y), max(*x, *y)
                axes.plot([low, high], [low, high], color="0.8", zorder=0)
                axes.scatter(x, y, s=4, linewidths=0, label=name)
            elif panel.kind == "bars":
                axes.bar(x, y)
            else:
                axes.plot(x, y, label=name)
        if panel.ticks:
            axes.set_xticks(*zip(*panel.ticks, strict=True))
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        if panel.kind != "bars":
            axes.legend()
    figure.savefig(path, dpi=150)


def _page(report: Report, panels: Sequence[Panel]) -> str:
    drawn = "\n".join(_svg(panel) for panel in panels)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>train and rollout</title><style>'
        "body{font-family:sans-serif;margin:2em}svg{margin-right:1em}text{font-size:11px;fill:#333}"
        ".axis{stroke:#bbb}.a{stroke:#1f77b4;fill:#1f77b4}.b{stroke:#d62728;fill:#d62728}.line{fill:none}"
        f"</style></head><body>\n{drawn}\n<pre>{html.escape(str(report))}</pre>\n</body></html>\n"
    )


def _svg(panel: Panel) -> str:
    xs = [v for _, x, _ in panel.lines for v in x]
    ys = [v for _, _, y in panel.lines for v in y]
    if panel.kind == "points":
        xs = ys = [*xs, *ys]  # one scale, so that equals are a diagonal
    elif panel.kind == "bars":
        xs, ys = [min(xs) - 0.5, max(xs) + 0.5], [0.0, *ys]
    x_axis, y_axis = _Axis.over(xs, _EDGE, _WIDTH - 8), _Axis.over(ys, _HEIGHT - 40, 24)
    middle = _HEIGHT // 2
    parts = [
        f'<text x="{_WIDTH / 2:.0f}" y="14" text-anchor="middle"><tspan font-weight="bold">'
        f"{html.escape(panel.title)}</tspan></text>",
        f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(panel.x)}</text>',
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{html.escape(panel.y)}</text>",
    ]
    for value, label in panel.ticks or x_axis.ticks():
        at = x_axis.at(value)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="24" y2="{_HEIGHT - 40}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 26}" text-anchor="middle">{label}</text>')
    for value, label in y_axis.ticks():
        at = y_axis.at(value)
        parts.append(f'<line class="axis" x1="{_EDGE}" x2="{_WIDTH - 8}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_EDGE - 4}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for k, (name, x, y) in enumerate(panel.lines):
        places = [(x_axis.at(a), y_axis.at(b)) for a, b in zip(x, y, strict=True)]
        parts.append(_mark(panel.kind, "ab"[k], places, y_axis.at(0.0) if panel.kind == "bars" else 0.0))
        if name:
            parts.append(
                f'<text x="{_WIDTH - 12}" y="{38 + 14 * k}" text-anchor="end"><tspan class="{"ab"[k]}" '
                f'stroke="none">{html.escape(name)}</tspan></text>'
            )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _mark(kind: str, colour: str, places: list[tuple[float, float]], floor: float) -> str:
    if kind == "points":
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        return f'<path class="{colour}" d="{dots}" stroke-width="3" stroke-linecap="round" opacity="0.5"/>'
    if kind == "bars":
        width = min((b[0] - a[0] for a, b in zip(places, places[1:], strict=False)), default=60.0) * 0.8
        return "".join(
            f'<rect class="{colour}" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{floor - y:.1f}"/>'
            for x, y in places
        )
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="{colour} line" points="{way}" stroke-width="2"/>'


class _Axis(NamedTuple):
    """From values to places on the paper."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        low, high = min(values), max(values)
        room = (high - low) * 0.04 or max(abs(high), 1.0) * 1e-3
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """At most seven round numbers."""
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 2))
        step *= next(k for k in (0.5, 1, 2, 5, 10) if (self.high - self.low) / (step * k) <= 6)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [(k * step, f"{k * step:.10g}") for k in range(first, last + 1)]
