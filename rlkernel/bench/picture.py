"""The picture at the head of README.md: bars of speed and memory, drawn from the committed reports."""

from collections.abc import Iterable
from html import escape
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

from rlkernel.bench import report


class Timed(NamedTuple):
    """A bar of speed: what of which report."""

    report: str
    op: str
    case: str
    dtype: str
    passed: str
    backend: str = "native"


BOTH = "forward+backward"
ON_GPU = (
    Timed("logprob-h200", "logprob", "N=8192 V=151936 T=1.0 entropy", "bfloat16", BOTH),
    Timed("linear_logprob-h200", "linear_logprob", "N=8192 H=4096 V=128256 T=0.8", "bfloat16", BOTH),
    Timed("losses-h200", "policy_loss", "B=64 L=4096", "float32", BOTH),
    Timed("sampling-h200", "sampling", "B=64 V=151936 T=0.8 top_p 0.95", "bfloat16", "forward"),
    Timed(
        *("prefix_shared_attention-h200", "prefix_shared_attention"),
        *("P=4096 L=512 G=16 Hq=32 Hkv=8 D=128", "bfloat16", BOTH, "triton"),
    ),
)
ON_CPU = (
    Timed("logprob", "logprob", "N=4096 V=32768 T=1.0 entropy", "bfloat16", BOTH),
    Timed("linear_logprob", "linear_logprob", "N=4096 H=1024 V=32768 T=0.8 entropy", "float32", BOTH),
    Timed("losses", "policy_loss", "B=64 L=4096", "float32", BOTH),
    Timed("sampling", "sampling", "B=64 V=151936 T=0.8 top_p 0.95", "bfloat16", "forward"),
    Timed(
        *("prefix_shared_attention", "prefix_shared_attention"),
        *("P=1024 L=64 G=16 Hq=8 Hkv=2 D=64", "float32", BOTH),
    ),
)
MEMORY_ON_GPU = Timed(
    "memory-h200", "linear_logprob", "N=32768 H=4096 V=128256 T=0.8 group 64", "bfloat16", BOTH
)
MEMORY_ON_CPU = Timed("memory", "linear_logprob", "N=16384 H=512 V=16032 T=0.8 group 256", "bfloat16", BOTH)
WIDTH, HEIGHT, ROW, LEFT, END = 470, 236, 36, 16, 280
MIB = 2**20
SHORT = {"bfloat16": "bf16", "float32": "fp32"}


class Bar(NamedTuple):
    label: str
    note: str
    length: float  # of the panel
    value: str
    ours: bool


def svg(results: Path) -> str:
    """The bars between the markers of ``docs/speed_and_memory.svg``."""
    panels = (
        (0, 0, "On an H200, times as fast as the fastest peer", _speed(results, ON_GPU)),
        (0, 1, "On a CPU, times as fast as the fastest peer", _speed(results, ON_CPU)),
        (1, 0, "Extra memory of linear_logprob on an H200", _memory(results, MEMORY_ON_GPU)),
        (1, 1, "On a CPU, of a smaller head, more peers", _memory(results, MEMORY_ON_CPU)),
    )
    lines = [line for x, y, title, bars in panels for line in _panel(x * WIDTH, y * HEIGHT, title, bars)]
    return "\n".join(lines) + "\n"


def _row(results: Path, wanted: Timed) -> dict[str, Any]:
    from rlkernel.bench.readme import newest  # which makes this picture

    for row in report.load(newest(results, wanted.report))["rows"]:
        if (row["op"], row["case"], row["dtype"], row["pass"], row["backend"]) == wanted[1:]:
            return dict(row)
    raise ValueError(f"the newest report called {wanted.report} must have {wanted[1:]}, got none such")


def _speed(results: Path, bars: Iterable[Timed]) -> list[Bar]:
    found = []
    for bar in bars:
        row = _row(results, bar)
        peers = {
            peer: timed["seconds"]
            for peer, timed in row["peers"].items()
            if timed["seconds"] and not timed["bare"] and not peer.startswith("fewer")
        }
        fastest = min(peers, key=lambda peer: peers[peer])
        gradients = " with gradients" if "backward" in bar.passed else ""
        note = f"{fastest}; {bar.case}, {SHORT[bar.dtype]}{gradients}"
        found.append((bar.op, note, peers[fastest] / row["seconds"]))
    most = max(ratio for _, _, ratio in found)
    return [Bar(op, note, _log_length(ratio, most), f"{ratio:.1f}x", True) for op, note, ratio in found]


def _memory(results: Path, wanted: Timed) -> list[Bar]:
    row = _row(results, wanted)
    peaks = {
        name: peer["peak_extra_bytes"]
        for name, peer in row["peers"].items()
        if peer["peak_extra_bytes"] and not peer["bare"]
    }
    peaks["rlkernel"] = row["peak_extra_bytes"]
    most, least = max(peaks.values()), min(peaks.values())
    bars = []
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        length = _log_length(peak / least * 2, most / least * 2)
        bars.append(Bar(name, "", length, f"{peak / MIB:,.0f} MiB", name == "rlkernel"))
    return bars


def _log_length(ratio: float, most: float) -> float:
    """Logarithmic: 1 has no length, ``most`` the whole."""
    return max(0.02, log10(max(ratio, 1.0)) / log10(most))


def _panel(x: int, top: int, title: str, bars: Iterable[Bar]) -> list[str]:
    lines = [f'<text class="title" x="{x + LEFT}" y="{top + 24}">{escape(title)}</text>']
    for i, bar in enumerate(bars):
        y = top + 40 + i * ROW
        said = f"{bar.label} <tspan class='note'>{escape(bar.note)}</tspan>" if bar.note else bar.label
        lines += [
            f'<text x="{x + LEFT}" y="{y + 11}">{said}</text>',
            f'<rect class="{"ours" if bar.ours else "peer"}" x="{x + LEFT}" y="{y + 15}" '
            f'width="{bar.length * END:.0f}" height="11" rx="2"/>',
            f'<text class="value" x="{x + LEFT + bar.length * END + 6:.0f}" y="{y + 25}">{bar.value}</text>',
        ]
    return lines
