"""Compiles the device code for every GPU architecture, without a GPU, and compares it with the ledger.

    python tests/codegen/check.py [--only cuda|hip|triton] [--require] [--write] [--markdown FILE]

CUDA for sm_80, sm_90a and sm_100 with nvcc (from CUDA_HOME, PATH, or NVIDIA's wheels on PyPI), HIP for gfx90a
and gfx942 with clang-19 (from PATH or Debian) and Debian's HIP headers, Triton's kernels for sm_80, sm_90,
sm_100 and gfx942. What is missing is fetched: clang is installed where this is root, the rest goes to
build/codegen. A compiler that cannot be had is reported as SKIPPED; with --require that fails too.

A spill is an error, and each gate is also shown a kernel that spills, and must reject it. So is what is worse
than in benchmarks/results/codegen.json, where the compiler is the one whose code that has: 5% more
instructions, a product of tensor cores or a copy that vanished, registers that leave room for fewer warps.
--write writes it anew; what was compiled here stands in build/codegen/codegen.json in any case.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import compilers
import portable
from compilers import Kernel, Missing

from rlkernel.bench import ledger
from rlkernel.bench.ledger import Ledger, Part

ROOT = compilers.ROOT
HERE = ROOT / "build/codegen/codegen.json"
PARTS = ("cuda", "hip", "triton")
LEGEND = "Registers / bytes spilled / bytes of shared memory. Flags: bias, scale or softcap; entropy."
PLANTED = Path(__file__).parent / "spill.cu"


@dataclass(frozen=True)
class Job:
    compiler: compilers.Compiler
    source: Path
    arch: str

    def run(self) -> tuple["Job", list[Kernel], list[str]]:
        return self, *self.compiler.compile(self.source, self.arch)


@dataclass(frozen=True)
class Checked:
    compiler: str  # with its version
    records: Part  # empty where the code could not be read
    table: str
    problems: list[str]


def check(part: str, workers: int) -> Checked:
    """What a part compiles to on all its architectures, and what is wrong with it."""
    if part == "triton":
        return _triton()
    compiler = compilers.find(part)
    print(f"{part}: {compiler.path}", flush=True)
    sources = sorted((ROOT / "csrc" / part).glob(f"*.{compiler.suffix}"))
    jobs = [Job(compiler, source, arch) for source in sources for arch in compiler.archs]
    planted = [Job(compiler, PLANTED, arch) for arch in compiler.archs]
    kernels: list[tuple[Job, Kernel]] = []
    problems: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        for job, found, errors in pool.map(Job.run, jobs):
            kernels.extend((job, kernel) for kernel in found)
            problems.extend(f"{job.source.name} for {job.arch}: {error}" for error in errors)
        for job, _, errors in pool.map(Job.run, planted):
            if not any("spill" in error for error in errors):
                problems.append(f"the gate for {job.arch} accepts a kernel that spills")
    if not kernels:
        problems.append(f"{part}: no kernel was compiled")
    return Checked(compiler.version, _records(kernels), table(kernels), problems)


def _records(kernels: list[tuple[Job, Kernel]]) -> Part:
    found: Part = {}
    for job, kernel in kernels:
        if kernel.record is not None:
            found.setdefault(job.arch, {})[f"{job.source.stem}: {kernel.name}"] = kernel.record
    return found


def _triton() -> Checked:
    try:
        version = portable.version()
    except ImportError as error:
        raise Missing(f"Triton is not installed: {error}") from error
    print(f"triton: {version}", flush=True)
    try:
        reports = portable.reports()
    except RuntimeError as error:
        return Checked(version, {}, "", [str(error)])
    return Checked(version, portable.records(reports), "", portable.spills(reports))


def table(kernels: list[tuple[Job, Kernel]]) -> str:
    """One line per kernel: registers, spilled bytes and shared memory for each architecture."""
    archs = list(dict.fromkeys(job.arch for job, _ in kernels))
    cells = {(kernel.name, job.arch): kernel for job, kernel in kernels}
    lines = [f"| kernel | {' | '.join(archs)} |", f"|---|{'---|' * len(archs)}"]
    for name in sorted({name for name, _ in cells}):
        row = [str(cells[name, arch]) if (name, arch) in cells else "" for arch in archs]
        lines.append(f"| `{name}` | {' | '.join(row)} |")
    return "\n".join([LEGEND, "", *lines])


def compare(part: str, checked: Checked, known: Ledger | None) -> tuple[str, list[str]]:
    """What is to be said of the ledger, and what is worse than there."""
    if not checked.records:
        return "its code cannot be read: nvdisasm was not found (PATH, CUDA_HOME, Triton)", []
    if known is None:
        return f"there is no {ledger.FILE.name}: nothing is compared", []
    compiler = known.compilers.get(part)
    if compiler != checked.compiler:
        return f"the ledger is of {compiler}, this is {checked.compiler}: nothing is compared", []
    problems = known.differences(part, checked.records)
    count = sum(map(len, checked.records.values()))
    return f"{count} kernels beside the ledger, {len(problems)} worse", problems


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--require", action="store_true", help="a compiler that cannot be had is a failure")
    parser.add_argument("--write", action="store_true", help="write the ledger anew instead of comparing")
    parser.add_argument("--markdown", type=Path, help="write the table of resources to this file")
    parser.add_argument("--jobs", type=int, default=4)
    options = parser.parse_args()
    known = _ledger(options.write)
    here = Ledger(*((known.compilers, known.parts) if known else ({}, {})))
    status, tables = 0, []
    for part in (options.only,) if options.only else PARTS:
        try:
            checked = check(part, options.jobs)
        except Missing as reason:
            print(f"{part}: SKIPPED: {reason}")
            status |= options.require
            continue
        if checked.table:
            tables.append(checked.table)
            print(checked.table)
        problems = list(checked.problems)
        if options.write:
            said = "written to the ledger"
        else:
            said, worse = compare(part, checked, known)
            problems += worse
            status |= options.require and not checked.records
        if checked.records:
            here.compilers[part], here.parts[part] = checked.compiler, checked.records
        print(f"{part}: {said}")
        for problem in problems:
            print(f"{part}: ERROR: {problem}")
        counts = [len(kernels) for kernels in checked.records.values()]
        print(f"{part}: {sum(counts)} kernels for {len(counts)} architectures, {len(problems)} errors")
        status |= bool(problems)
    HERE.parent.mkdir(parents=True, exist_ok=True)
    HERE.write_text(here.text())
    if options.write:
        ledger.FILE.write_text(here.text())
    elif status:
        print(
            "what is meant is written to the ledger by: make check-codegen ARGS=--write "
            f"(now: {HERE.relative_to(ROOT)})"
        )
    if options.markdown:
        options.markdown.write_text("\n\n".join(tables) + "\n")
    return int(status)


def _ledger(anew: bool) -> Ledger | None:
    try:
        return Ledger.load()
    except (OSError, ValueError) as error:
        if not anew and isinstance(error, ValueError):
            raise
        return None


if __name__ == "__main__":
    sys.exit(main())
