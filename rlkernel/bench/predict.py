"""``predict``: how long the headline shapes should take on a GPU, from the ledger of the compiled code.

A launch takes as long as the slowest of three: its bytes at the rate that the memory reaches and its code
allows, its products at the rate of the tensor cores, and a block's own time where there are few of them.  The
last wave of blocks may be part empty, and every launch begins with a pause.  Beside it stands what a report
of such a GPU measured, where there is one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rlkernel.bench import ledger, render, report
from rlkernel.bench.cases import UsageError
from rlkernel.bench.devices import DEVICES, Device
from rlkernel.bench.headlines import Headline, Launch, headlines
from rlkernel.bench.ledger import FILE, Ledger, Record

_SCHEDULERS = 4  # of a multiprocessor, each of which issues one instruction a clock

COLUMNS = ("op", "shape", "pass", "code", "bound by", "floor", "predicted", "measured")


class Time(NamedTuple):
    """Seconds of a launch, and of what most."""

    seconds: float
    bound: str
    floor: float  # at the stated bandwidth and peak, without a pause


class Prediction(NamedTuple):
    headline: Headline
    times: list[tuple[Launch, Time]]

    @property
    def seconds(self) -> float:
        return sum(time.seconds for _, time in self.times)

    @property
    def floor(self) -> float:
        return sum(time.floor for _, time in self.times)

    @property
    def bound(self) -> str:
        return max(self.times, key=lambda x: x[1].seconds)[1].bound


def time_of(launch: Launch, device: Device, known: Ledger) -> Time:
    """How long a launch takes. Raises KeyError where the ledger has no code of it for the device."""
    record = _record(launch, device, known)
    limit = ledger.bound(record, device) if record else None
    share, what, busiest = limit or (1.0, "", "")
    if launch.apart and record is not None and what == "peak":
        taking_turns = _apart(record, device)
        share, busiest = min((share, busiest), (taking_turns, "products and the rest by turns"))
    parts = {}
    moved = launch.read + launch.written
    if moved:
        reached = device.copies if launch.written > moved / 10 else device.reads
        code = share if what == "bandwidth" else 1.0
        parts[busiest if code < reached else "bandwidth"] = moved / device.bandwidth / min(reached, code)
    if launch.flops:
        code = share if what == "peak" else 1.0
        reached = device.gemm * code if launch.apart else min(device.gemm, code)
        parts[busiest if code < device.gemm else "tensor cores"] = (
            launch.flops / device.peak / reached / _full(launch, device)
        )
    if launch.alone and record:
        parts["one block's time"] = _alone(launch, record, device)
    if launch.again:
        moved_again = launch.alone * launch.blocks
        fits = moved_again <= device.cache
        rate = device.cache_bandwidth if fits else device.bandwidth * device.reads
        parts["L2" if fits else "bandwidth"] = moved_again / rate
    parts["launches"] = 0.0
    bound = max(parts, key=lambda name: parts[name])
    pauses = launch.times * device.launch
    floor = max(moved / device.bandwidth, launch.flops / device.peak)
    return Time(parts[bound] + pauses, "launches" if pauses > parts[bound] else bound, floor)


def _record(launch: Launch, device: Device, known: Ledger) -> Record | None:
    if launch.kernel is None:
        return None
    archs = [(p, a) for p in launch.kernel for a in device.archs if a in known.parts.get(p, {})]
    if not archs:
        parts = " or ".join(launch.kernel)
        raise KeyError(f"the ledger has nothing of {parts} for {device.label} ({', '.join(device.archs)})")
    part, arch = archs[0]
    return known.find(part, arch, launch.kernel[part])


def _full(launch: Launch, device: Device) -> float:
    """The share of a launch's waves that is full: blocks that take a multiprocessor each."""
    if not launch.blocks:
        return 1.0
    waves = launch.waves or -(-launch.blocks // device.multiprocessors)
    return launch.blocks / device.multiprocessors / waves


def _apart(record: Record, device: Device) -> float:
    """The share of the peak where tensor cores rest while the other units are busy."""
    busy = ledger.clocks(record, device)
    products = busy["tensor cores"]
    rest = max(x for name, x in busy.items() if name not in ("tensor cores", "L2"))
    return products / (products + rest)


def _alone(launch: Launch, record: Record, device: Device) -> float:
    """Seconds of blocks that read ``alone`` bytes each, a wave of what multiprocessors hold after another."""
    turns = launch.alone / max(launch.warps * device.lanes * (launch.turn or record.loaded), 1)
    busy = {name: x for name, x in ledger.clocks(record, device).items() if name != "memory"}
    held = device.blocks(launch.warps, record.registers, record.shared) if launch.beside else 1
    # no more than there are
    held = min(held, -(-launch.blocks // device.multiprocessors))
    turn = max(device.latency / launch.ahead, held * launch.warps * max(busy.values()) / device.clock)
    if launch.issued:
        turn = launch.issued * max(device.pace, held * launch.warps / _SCHEDULERS) / device.clock
    waves = -(-launch.blocks // (device.multiprocessors * held))
    return (launch.waits + launch.lead * device.latency + max(turns, 1) * turn) * waves


def predictions(device: Device, known: Ledger) -> tuple[list[Prediction], list[str]]:
    """Of every headline, and why there is none of some."""
    found, missing = [], []
    for headline in headlines():
        try:
            times = [(launch, time_of(launch, device, known)) for launch in headline.launches(device)]
        except KeyError as reason:
            missing.append(f"{headline.op} {headline.note} {headline.direction}: {reason.args[0]}")
            continue
        found.append(Prediction(headline, times))
    return found, missing


def measured(headline: Headline, device: Device, reports: Iterable[dict[str, Any]]) -> float | None:
    """Seconds of the newest report of such a device that has this very call."""
    wanted = (headline.op, headline.case.name, headline.case.dtype, headline.backend, headline.direction)
    found = None
    for stored in sorted(reports, key=lambda x: str(x["header"].get("date", ""))):
        gpu = stored["header"].get("machine", {}).get("cuda:0", "")
        if stored["header"].get("device") != "cuda" or device.matches not in gpu:
            continue
        for row in stored["rows"]:
            got = tuple(row.get(name) for name in ("op", "case", "dtype", "backend", "pass"))
            if got == wanted and row.get("seconds"):
                found = float(row["seconds"])
    return found


def reports_of(files: Iterable[str]) -> list[dict[str, Any]]:
    """These reports, or those that stand beside the ledger.

    Raises:
        UsageError: a file that was named is no report.
    """
    named = [report.load(path) for path in files]
    if named:
        return named
    found = []
    for path in sorted(Path(FILE).parent.glob("*.json")):
        try:
            found.append(report.load(path))
        except UsageError:  # the ledger itself, or what an example measured
            continue
    return found


def text(name: str, files: Iterable[str] = (), detailed: bool = True) -> str:
    """The tables of a device.

    Raises:
        UsageError: there is no such device, no ledger, or a file is no report.
    """
    if name not in DEVICES:
        raise UsageError(f"--device of predict must be one of {', '.join(DEVICES)}, got {name}")
    device = DEVICES[name]
    try:
        known = Ledger.load()
    except (OSError, ValueError) as error:
        raise UsageError(f"predict must have the ledger of the compiled code, got {error}") from error
    found, missing = predictions(device, known)
    reports = reports_of(files)
    rows = [_row(prediction, measured(prediction.headline, device, reports)) for prediction in found]
    lines = [_head(device, known), "", *render.markdown_table(COLUMNS, rows)]
    if detailed:
        lines += ["", *render.markdown_table(("launch", "of", "times", "bound by", "ms"), _details(found))]
    lines += ["", *(f"not predicted: {reason}" for reason in missing)] if missing else []
    return "\n".join(lines) + "\n"


def _head(device: Device, known: Ledger) -> str:
    compilers = ", ".join(f"{part}: {version}" for part, version in sorted(known.compilers.items()))
    return (
        f"{device.label}: {device.multiprocessors} multiprocessors, {device.bandwidth / 1e12:.2f} TB/s of "
        f"which a read reaches {device.reads:.0%}, {device.peak / 1e12:.0f} TFLOP/s of which a GEMM reaches "
        f"{device.gemm:.0%}, {device.launch * 1e6:.0f} us a launch. Code of {compilers}."
    )


def _row(prediction: Prediction, seconds: float | None) -> list[str]:
    headline = prediction.headline
    case = f"{headline.case.name} {headline.case.dtype}"
    code = " ".join(filter(None, (headline.backend, headline.note)))
    said = "not yet" if seconds is None else f"{_ms(seconds)} ({seconds / prediction.seconds:.2f}x)"
    times = [f"{_ms(prediction.floor)}", f"{_ms(prediction.seconds)}", said]
    return [headline.op, case, headline.direction, code, prediction.bound, *times]


def _details(found: list[Prediction]) -> list[list[str]]:
    return [
        [
            launch.name,
            f"{p.headline.op} {p.headline.case.name} {p.headline.direction}",
            str(launch.times),
            time.bound,
            _ms(time.seconds),
        ]
        for p in found
        for launch, time in p.times
    ]


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.3f} ms" if milliseconds < 1 else f"{milliseconds:.2f} ms"
