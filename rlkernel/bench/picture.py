"""The picture at the head of README.md: bars of speed and memory, drawn from the committed reports."""

from collections.abc import Iterable
from html import escape
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

from rlkernel.bench import report

# The report, its case and dtype, the pass, and what the bar is called.
SPEED = (
    ("logprob", "logprob", "N=4096 V=32768 T=1.0 entropy", "bfloat16", "forward+backward"),
    (*("linear_logprob",) * 2, "N=4096 H=1024 V=32768 T=0.8 entropy", "float32", "forward+backward"),
    ("losses", "policy_loss", "B=64 L=4096", "float32", "forward+backward"),
    ("sampling", "sampling", "B=64 V=151936 T=0.8 top_p 0.95", "bfloat16", "forward"),
    (*("prefix_shared_attention",) * 2, "P=1024 L=64 G=16 Hq=8 Hkv=2 D=64", "float32", "forward+backward"),
)
MEMORY = ("linear_logprob", "N=16384 H=512 V=16032 T=0.8 group 256", "bfloat16", "forward+backward")
WIDTH, ROW, LEFT, END = 470, 36, 16, 300
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
    speed, memory = _speed(results), _memory(results)
    left = _panel(0, "Times as fast as the fastest peer", speed)
    right = _panel(WIDTH, "Extra memory of linear_logprob, MiB", memory)
    return "\n".join([*left, *right]) + "\n"


def _row(results: Path, name: str, op: str, case: str, dtype: str, passed: str) -> dict[str, Any]:
    from rlkernel.bench.readme import newest  # which makes this picture

    wanted = (op, case, dtype, passed, "native")
    for row in report.load(newest(results, name))["rows"]:
        if (row["op"], row["case"], row["dtype"], row["pass"], row["backend"]) == wanted:
            return dict(row)
    raise ValueError(f"the newest report called {name} must have {wanted}, got none such")


def _speed(results: Path) -> list[Bar]:
    found = []
    for name, op, case, dtype, passed in SPEED:
        row = _row(results, name, op, case, dtype, passed)
        peers = {
            peer: timed["seconds"]
            for peer, timed in row["peers"].items()
            if timed["seconds"] and not timed["bare"] and not peer.startswith("fewer")
        }
        fastest = min(peers, key=lambda peer: peers[peer])
        gradients = " with gradients" if "backward" in passed else ""
        found.append((op, f"{fastest}; {case}, {SHORT[dtype]}{gradients}", peers[fastest] / row["seconds"]))
    most = max(ratio for _, _, ratio in found)
    return [Bar(op, note, _log_length(ratio, most), f"{ratio:.1f}x", True) for op, note, ratio in found]


def _memory(results: Path) -> list[Bar]:
    row = _row(results, "memory", *MEMORY)
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
        bars.append(Bar(name, "", length, f"{peak / MIB:.0f} MiB", name == "rlkernel"))
    return bars


def _log_length(ratio: float, most: float) -> float:
    """Logarithmic: 1 has no length, ``most`` the whole."""
    return max(0.02, log10(max(ratio, 1.0)) / log10(most))


def _panel(x: int, title: str, bars: Iterable[Bar]) -> list[str]:
    lines = [f'<text class="title" x="{x + LEFT}" y="24">{escape(title)}</text>']
    for i, bar in enumerate(bars):
        y = 40 + i * ROW
        said = f"{bar.label} <tspan class='note'>{escape(bar.note)}</tspan>" if bar.note else bar.label
        lines += [
            f'<text x="{x + LEFT}" y="{y + 11}">{said}</text>',
            f'<rect class="{"ours" if bar.ours else "peer"}" x="{x + LEFT}" y="{y + 15}" '
            f'width="{bar.length * END:.0f}" height="11" rx="2"/>',
            f'<text class="value" x="{x + LEFT + bar.length * END + 6:.0f}" y="{y + 25}">{bar.value}</text>',
        ]
    return lines
