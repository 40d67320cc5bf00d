"""The ledger of the compiled code: what every kernel takes and does on every architecture, and its limits.

``make check-codegen`` compares what it compiled with ``benchmarks/results/codegen.json`` and writes it with
``ARGS=--write``; ``predict`` reckons with it and needs no compiler.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlkernel.bench import devices
from rlkernel.bench.devices import Device

FILE = Path(__file__).parent.parent / "benchmarks" / "results" / "codegen.json"
MORE = 1.05  # times as many instructions as the ledger has are too many
SLACK = 2  # instructions that are no rise, however few there were
SIZES = {"bf16": 2, "f16": 2, "fp16": 2, "f32": 4, "fp32": 4, "float": 4, "fp64": 8, "double": 8}


class Record(NamedTuple):
    """One kernel on one architecture.

    A turn is one way through its busiest loop, or through the whole of a kernel that has none.  Counts are of
    a warp, bytes of one of its lanes, both of one turn.
    """

    registers: int  # of a lane
    shared: int  # bytes of a block that are known when it is compiled
    spilled: int  # bytes of a lane
    warps: int  # of a block; 0 where the launch decides
    size: int  # instructions of the kernel
    looped: bool
    turn: int  # instructions
    loaded: int  # bytes
    stored: int
    flops: int  # of tensor cores; 0 where their shape is not known too
    tensor: int
    fma: int
    alu: int
    special: int
    fp64: int
    lsu: int
    units: Mapping[str, int]  # of the whole kernel: products of tensor cores, copies past the registers

    @property
    def work(self) -> int:
        """What the instructions of a turn are for."""
        return self.flops or self.loaded + self.stored

    def per_element(self, name: str) -> float | None:
        """Instructions of a lane for each element that it loads, of the first dtype in a kernel's name."""
        size = next((SIZES[word] for word in re.findall(r"[a-z]+\d*", name) if word in SIZES), 4)
        return self.turn * size / self.loaded if self.loaded and not self.flops else None


def clocks(record: Record, device: Device) -> dict[str, float]:
    """Clocks of a multiprocessor that one turn of a warp keeps each of its parts busy."""
    lanes = device.lanes
    parts = {name: getattr(record, name) * lanes / getattr(device, name) for name in _LANED}
    if device.issue:
        parts["issue"] = record.turn / device.issue
    multiplied = device.peak * (device.mma_sync if any(u.startswith("HMMA") for u in record.units) else 1)
    parts["tensor cores"] = record.flops / device.clocks(multiplied)
    parts["memory"] = (record.loaded + record.stored) * lanes / device.clocks(device.bandwidth)
    if record.flops:  # what a tile loads others load too: it comes from the L2
        del parts["memory"]
        parts["L2"] = record.loaded * lanes / device.clocks(device.cache_bandwidth)
    return parts


_LANED = ("fma", "alu", "special", "fp64", "lsu")


def bound(record: Record, device: Device) -> tuple[float, str, str] | None:
    """The share that the code can reach at most, of what, and what is busiest; None where it moves nothing.

    The share of the bandwidth, or of the tensor cores' peak where it multiplies: what a turn takes of it
    beside the part that it keeps busy longest.
    """
    busy = clocks(record, device)
    if record.flops:
        useful, what = record.flops / device.clocks(device.peak), "peak"
    elif record.loaded + record.stored:
        useful, what = busy["memory"], "bandwidth"
    else:
        return None
    busiest = max(busy, key=lambda name: busy[name])
    return min(1.0, useful / busy[busiest]), what, busiest


def worse(before: Record, after: Record, device: Device) -> list[str]:
    """What has become worse, in words."""
    found = []
    if after.spilled > before.spilled:
        found.append(f"spills {after.spilled} bytes, the ledger has {before.spilled}")
    after_kinds = {_family(unit) for unit in after.units}
    for kind in sorted({_family(unit) for unit in before.units} - after_kinds):
        found.append(f"{kind} has vanished")
    if after.size > before.size * MORE + SLACK:
        found.append(f"{after.size} instructions, the ledger has {before.size}")
    if before.work and after.work and bool(before.flops) == bool(after.flops):
        unit = "operations" if after.flops else "bytes"
        scale = after.work / before.work
        if after.turn > before.turn * scale * MORE + SLACK * max(scale, 1):
            found.append(
                f"{after.turn} instructions for {after.work} {unit} in its loop, the ledger has "
                f"{before.turn} for {before.work}"
            )
    elif before.work and not after.work:
        found.append("its loop loads nothing and multiplies nothing, that of the ledger does")
    elif after.turn > before.turn * MORE + SLACK:
        found.append(f"{after.turn} instructions in its loop, the ledger has {before.turn}")
    held = device.resident(before.registers), device.resident(after.registers)
    if held[1] < held[0]:
        found.append(
            f"{after.registers} registers leave room for {held[1]} warps, the ledger's {before.registers} "
            f"for {held[0]}"
        )
    if after.shared > before.shared * MORE + 1024:
        found.append(f"{after.shared} bytes of shared memory, the ledger has {before.shared}")
    return found


def _family(unit: str) -> str:
    """``HGMMA`` of ``HGMMA.64x256x16.F32.BF16``: another tile is no loss by itself."""
    return re.sub(r"_f32_\d.*", "", unit.partition(".")[0])


Part = dict[str, dict[str, Record]]  # by architecture and kernel
COLUMNS = (*Record._fields, "per_element", "share")  # the last two follow from the others: for those who read


class Ledger:
    """The parts of the file, each with the compiler whose figures they are."""

    def __init__(self, compilers: Mapping[str, str], parts: Mapping[str, Part]) -> None:
        self.compilers, self.parts = dict(compilers), dict(parts)

    @classmethod
    def load(cls, path: Path = FILE) -> "Ledger":
        """Raises OSError where there is none, ValueError where it is of another form."""
        stored = json.loads(path.read_text())
        if stored.get("columns") != [*COLUMNS]:
            raise ValueError(f"{path.name} must have the columns {', '.join(COLUMNS)}; write it anew")
        parts = {
            part: {
                arch: {name: Record(*row[: len(Record._fields)]) for name, row in kernels.items()}
                for arch, kernels in archs.items()
            }
            for part, archs in stored["parts"].items()
        }
        return cls(stored["compilers"], parts)

    def find(self, part: str, arch: str, name: str) -> Record:
        """The record of a kernel; raises KeyError saying which."""
        found = self.parts.get(part, {}).get(arch, {}).get(name)
        if found is None:
            raise KeyError(f"the ledger has no {name} of {part} for {arch}")
        return found

    def text(self) -> str:
        """The file: a line for each kernel, in the order of their names."""
        lines = ["{", f' "columns": {json.dumps(COLUMNS)},']
        lines += [f' "compilers": {json.dumps(dict(sorted(self.compilers.items())))},', ' "parts": {']
        for part, archs in sorted(self.parts.items()):
            lines.append(f"  {json.dumps(part)}: {{")
            for arch, kernels in sorted(archs.items()):
                lines.append(f"   {json.dumps(arch)}: {{")
                rows = [f"    {json.dumps(n)}: {_row(n, kernels[n], arch)}" for n in sorted(kernels)]
                lines += [",\n".join(rows), "   },"]
            lines[-1] = "   }"
            lines.append("  },")
        lines[-1] = "  }"
        return "\n".join([*lines, " }", "}"]) + "\n"

    def differences(self, part: str, found: Part) -> list[str]:
        """What is worse than in the ledger, and kernels that only one of the two has.

        Of the very compiler that the ledger's figures are of: another one compiles otherwise.
        """
        known = self.parts.get(part, {})
        problems = []
        for arch, kernels in found.items():
            device = devices.of_arch(arch)
            before = known.get(arch, {})
            problems += [
                f"{n} for {arch} is not in the ledger" for n in sorted(kernels.keys() - before.keys())
            ]
            problems += [
                f"{n} for {arch} is in the ledger alone" for n in sorted(before.keys() - kernels.keys())
            ]
            for name in sorted(kernels.keys() & before.keys()):
                problems += [f"{name} for {arch}: {w}" for w in worse(before[name], kernels[name], device)]
        return problems


def _row(name: str, record: Record, arch: str) -> str:
    limit, elements = bound(record, devices.of_arch(arch)), record.per_element(name)
    follows = [
        None if elements is None else round(elements, 2),
        None if limit is None else round(limit[0], 3),
    ]
    plain: list[Any] = [int(x) if isinstance(x, bool) else x for x in record]
    return json.dumps([*plain, *follows], separators=(",", ":"))
