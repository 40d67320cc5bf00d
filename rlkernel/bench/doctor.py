"""``doctor``: whether a machine is quiet enough for times to be trusted.

The same work is timed again and again, on one thread and on all of them, while the kernel's own counters tell
what else the machine did.  ``problems`` judges what was read; nothing else decides.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlkernel.bench import measure

SPREAD = 0.05  # half of what the middle half of the rounds lies between, of the median
SLOWER = 1.15  # the median over a fast round
WAITED = 0.05  # share of the time of one thread that it had no core
OTHERS = 0.25, 0.05  # cores that other processes kept busy: of any machine, and of each core of a large one
STOLEN = 0.02  # share of the time that a hypervisor gave to others
FOREIGN = 2**30  # bytes of a GPU's memory that other processes hold


@dataclass(frozen=True)
class Reading:
    """What was seen; None where this machine does not tell."""

    rounds: dict[str, list[float]]  # seconds of the same work, by what it was
    waited: float = 0.0  # share of the wall-clock time in which the work of one thread had no core
    cores: int = 1
    others: float | None = None  # cores that other processes kept busy
    stolen: float | None = None
    foreign: int | None = None
    load: float | None = None  # of the last minute: shown, not judged, since a run before counts in it
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For a report: figures without the rounds, and what is wrong with them."""
        found = {name: value for name, value in asdict(self).items() if name not in ("rounds", "notes")}
        spreads = {name: spread(times) for name, times in self.rounds.items()}
        return {**found, "spread": spreads, "problems": problems(self)}


def spread(times: list[float]) -> float:
    low, high = measure.quartiles(times) or (times[0], times[0])
    return (high - low) / 2 / statistics.median(times)


def slower(times: list[float]) -> float:
    """The median over a fast round, of which one in twenty is faster still: one lucky round says nothing."""
    return statistics.median(times) / sorted(times)[len(times) // 20]


def problems(reading: Reading) -> list[str]:
    """Why times that are measured now would not be trusted; empty on a quiet machine."""
    found = []
    for name, times in reading.rounds.items():
        if (share := spread(times)) > SPREAD:
            found.append(f"times of {name} spread by {share:.0%} around their median, more than {SPREAD:.0%}")
        elif (ratio := slower(times)) > SLOWER:
            found.append(f"{name} took {ratio:.2f} times a fast round, more than {SLOWER:g}")
    if reading.waited > WAITED:
        found.append(f"one thread waited for a core {reading.waited:.0%} of the time, more than {WAITED:.0%}")
    limit = max(OTHERS[0], OTHERS[1] * reading.cores)
    if reading.others is not None and reading.others > limit:
        found.append(
            f"other processes kept {reading.others:.1f} of {reading.cores} cores busy, more than {limit:.2g}"
        )
    if reading.stolen is not None and reading.stolen > STOLEN:
        found.append(f"the hypervisor took {reading.stolen:.0%} of the time, more than {STOLEN:.0%}")
    if reading.foreign is not None and reading.foreign > FOREIGN:
        found.append(f"other processes hold {reading.foreign / 2**30:.1f} GiB of this GPU, more than 1.0 GiB")
    return found


def read(device: str, seconds: float) -> Reading:
    """Look for about ``seconds``, one half on one thread and one on all, or on the GPU."""
    before = _Counters.now()
    threads = torch.get_num_threads()
    work = torch.randn(192, 192)  # in the caches, or memory that is shared would be judged too
    out = torch.empty_like(work)

    def alone() -> None:
        for _ in range(4):
            torch.mm(work, work, out=out)

    torch.set_num_threads(1)
    try:
        wall, cpu = time.perf_counter(), time.thread_time()
        rounds = {"one thread": repeat(alone, seconds / 2)}
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    finally:
        torch.set_num_threads(threads)
    foreign = None
    if device == "cuda":
        source = torch.ones(2**26, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        rounds["a copy on the GPU"] = measure.interleave(
            {"copy": lambda: target.copy_(source)}, device, seconds / 2
        )["copy"]
        free, total = torch.cuda.mem_get_info()
        foreign = total - free - torch.cuda.memory_reserved()
    elif threads > 1:
        large = torch.randn(384, 384)
        result = torch.empty_like(large)
        rounds[f"{threads} threads"] = repeat(lambda: torch.mm(large, large, out=result), seconds / 2)
    others, stolen = _Counters.now().since(before)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Reading(rounds, max(0.0, 1 - cpu / wall), os.cpu_count() or 1, others, stolen, foreign, load)


def repeat(
    call: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of rounds of ``call``, each about two milliseconds long, at least ten of them."""
    call()
    began = clock()
    call()
    calls = max(1, round(0.002 / max(clock() - began, 1e-6)))
    times: list[float] = []
    end = clock() + seconds
    while len(times) < 10 or clock() < end:
        began = clock()
        for _ in range(calls):
            call()
        times.append(clock() - began)
    return times


@dataclass(frozen=True)
class _Counters:
    """Seconds of all cores since the machine began, from /proc/stat, and this process's own."""

    wall: float
    busy: float | None
    stolen: float
    own: float

    @classmethod
    def now(cls) -> "_Counters":
        own = sum(os.times()[:2])
        try:
            line = Path("/proc/stat").read_text().partition("\n")[0].split()
            ticks = [int(x) / os.sysconf("SC_CLK_TCK") for x in line[1:9]]
        except (OSError, ValueError):  # not Linux
            return cls(time.perf_counter(), None, 0.0, own)
        user, nice, system, _, _, irq, soft, stolen = ticks
        return cls(time.perf_counter(), user + nice + system + irq + soft, stolen, own)

    def since(self, before: "_Counters") -> tuple[float | None, float | None]:
        """Cores that others kept busy, and the share of the time of all cores that was stolen."""
        wall = self.wall - before.wall
        if self.busy is None or before.busy is None or wall <= 0:
            return None, None
        others = (self.busy - before.busy - (self.own - before.own)) / wall
        return max(0.0, others), (self.stolen - before.stolen) / wall / (os.cpu_count() or 1)


def text(reading: Reading) -> str:
    """What was seen, and the verdict."""
    lines = [
        f"{name:<18} {len(times)} rounds, median {statistics.median(times) * 1e3:.2f} ms, "
        f"spread {spread(times):.1%}, median / fast {slower(times):.2f}"
        for name, times in reading.rounds.items()
    ]
    lines.append(f"{'waiting for a core':<18} {reading.waited:.1%} of the time of one thread")
    if reading.others is not None:
        lines.append(f"{'other processes':<18} {reading.others:.2f} of {reading.cores} cores")
    if reading.stolen is not None:
        lines.append(f"{'hypervisor':<18} took {reading.stolen:.1%}")
    if reading.foreign is not None:
        lines.append(f"{'GPU memory':<18} {reading.foreign / 2**30:.1f} GiB held by other processes")
    if reading.load is not None:
        lines.append(f"{'load':<18} {reading.load:.1f} in the last minute")
    found = problems(reading)
    lines += ["", *(f"busy: {problem}" for problem in found)]
    lines.append("too busy to trust times" if found else "quiet: times can be trusted")
    return "\n".join(lines) + "\n"
