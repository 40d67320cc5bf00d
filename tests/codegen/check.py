"""Compiles the device code for every GPU architecture, on a machine without any: a spill is an error.

    python tests/codegen/check.py [--only cuda|hip] [--require] [--markdown FILE]

CUDA for sm_80, sm_90a and sm_100 with nvcc (from CUDA_HOME, PATH, or NVIDIA's wheels on PyPI), HIP for gfx90a
and gfx942 with clang-19 (from PATH or Debian) and Debian's HIP headers. What is missing is fetched: clang is
installed where this is root, the rest goes to build/codegen. A compiler that cannot be had is reported as
SKIPPED; with --require that fails too. Each gate is also shown a kernel that spills, and must reject it.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import compilers
from compilers import Kernel, Missing

ROOT = compilers.ROOT
LEGEND = "Registers / bytes spilled / bytes of shared memory. Flags: bias, scale or softcap; entropy."
PLANTED = Path(__file__).parent / "spill.cu"


@dataclass(frozen=True)
class Job:
    compiler: compilers.Compiler
    source: Path
    arch: str

    def run(self) -> tuple["Job", list[Kernel], list[str]]:
        return self, *self.compiler.compile(self.source, self.arch)


def check(part: str, workers: int) -> tuple[list[tuple[Job, Kernel]], list[str]]:
    """The kernels of a part on all its architectures, and what is wrong with them."""
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
    return kernels, problems


def table(kernels: list[tuple[Job, Kernel]]) -> str:
    """One line per kernel: registers, spilled bytes and shared memory for each architecture."""
    archs = list(dict.fromkeys(job.arch for job, _ in kernels))
    cells = {(kernel.name, job.arch): kernel for job, kernel in kernels}
    lines = [f"| kernel | {' | '.join(archs)} |", f"|---|{'---|' * len(archs)}"]
    for name in sorted({name for name, _ in cells}):
        row = [str(cells[name, arch]) if (name, arch) in cells else "" for arch in archs]
        lines.append(f"| `{name}` | {' | '.join(row)} |")
    return "\n".join([LEGEND, "", *lines])


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", choices=("cuda", "hip"))
    parser.add_argument("--require", action="store_true", help="a compiler that cannot be had is a failure")
    parser.add_argument("--markdown", type=Path, help="write the table of resources to this file")
    parser.add_argument("--jobs", type=int, default=4)
    options = parser.parse_args()
    status, tables = 0, []
    for part in (options.only,) if options.only else ("cuda", "hip"):
        try:
            kernels, problems = check(part, options.jobs)
        except Missing as reason:
            print(f"{part}: SKIPPED: {reason}")
            status |= options.require
            continue
        tables.append(table(kernels))
        print(tables[-1])
        for problem in problems:
            print(f"{part}: ERROR: {problem}")
        archs = len({job.arch for job, _ in kernels})
        print(f"{part}: {len(kernels)} kernels for {archs} architectures, {len(problems)} errors")
        status |= bool(problems)
    if options.markdown:
        options.markdown.write_text("\n\n".join(tables) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
