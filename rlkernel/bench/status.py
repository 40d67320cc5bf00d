"""What has run where: a word for every op and backend, for ``readme``.

That a GPU ran an op is read from the committed reports, whose rows passed parity there. The other words are
held to by tests/test_status.py: it runs every op in emulation and in the interpreter, and looks for each
kernel that was launched among those that are compiled for every architecture.
"""

from pathlib import Path

from rlkernel import dispatch
from rlkernel.bench import render, report
from rlkernel.bench.cases import UsageError

LIBRARIES = ("flashinfer", "aiter")
SHOWN = {  # a column: the backends that fill it, and what they do where there is no GPU
    "plain PyTorch": (("reference",), "run"),
    "CPU": (("native",), "run"),
    "CUDA": (("native",), "emulated, compiled"),
    "HIP": (("native",), "emulated, compiled"),
    "Triton": (("triton",), "interpreted, compiled"),
    "FlashInfer, AITER": (LIBRARIES, "not run"),
}
CPU_ONLY = (
    "attention",
    "divergence",
    "linear_divergence",
    "matmul",
    "paged_prefix_attention",
)  # ops whose compiled kernels are a CPU's alone
COLUMNS = ("op", *SHOWN)
LEGEND = (
    "run: its tests run on this backend, on a CPU",
    "emulated: the source that nvcc (32 lanes a warp) or clang (64) compiles runs on a CPU, barriers and "
    "shuffles; for GEMMs and attention of the vendors' libraries torch's for the CPU stand in",
    "interpreted: Triton's interpreter runs the kernels on a CPU",
    "compiled: for every architecture that is named, and nothing spills (`make check-codegen`, `make test`)",
    "run on a GPU: there it agreed with fp64, in a report under `benchmarks/results`",
    "not run: needs a GPU and a library; its adapter runs against a stand-in",
)
Runs = dict[tuple[str, str], list[str]]  # of (op, column): the GPUs that ran it


def runs(results: Path) -> Runs:
    """Where a GPU ran an op and agreed with fp64, by the reports."""
    found: Runs = {}
    for path in sorted(results.glob("*.json")):
        try:
            stored = report.load(path)
        except UsageError:  # what an example measured
            continue
        if stored["header"].get("device") != "cuda":
            continue
        gpu = stored["header"]["machine"].get("cuda:0", "an unnamed GPU")
        for row in stored["rows"]:
            if row.get("op") and not row.get("skipped") and not row.get("failures"):
                names = found.setdefault((row["op"], _column(row["backend"], gpu)), [])
                names += [] if _short(gpu) in names else [_short(gpu)]
    return found


def _column(backend: str, gpu: str) -> str:
    if backend == "native":
        return "HIP" if "gfx" in gpu else "CUDA"
    if backend in LIBRARIES:
        return COLUMNS[-1]
    return "Triton" if backend == "triton" else COLUMNS[1]


def _short(gpu: str) -> str:
    return gpu.partition(",")[0]


def line(results: Path) -> str:
    """Whether any GPU has run any of this."""
    gpus = sorted({gpu for names in runs(results).values() for gpu in names})
    if gpus:
        return (
            f"**Run on {', '.join(gpus)}**; what ran there and what only in emulation: [status](#status).\n"
        )
    return (
        "**No GPU has run any of this yet.** Its kernels for GPUs are emulated and interpreted on CPUs, and "
        "compiled for every architecture: [status](#status).\n"
    )


def table(results: Path) -> str:
    """A line per op, a column per backend, and what the words mean."""
    ran = runs(results)
    rows = ([f"`{op}`", *(_cell(op, column, ran) for column in COLUMNS[1:])] for op in dispatch.ops())
    return "\n".join([*render.markdown_table(COLUMNS, rows), "", *(f"- {text}" for text in LEGEND)]) + "\n"


def _cell(op: str, column: str, ran: Runs) -> str:
    backends, word = SHOWN[column]
    if op in CPU_ONLY and column in ("CUDA", "HIP"):
        return ""
    without_gpu = word if any(_has_file(backend, op) for backend in backends) else ""
    if gpus := ran.get((op, column)):
        return f"run on {', '.join(gpus)}" + ("" if without_gpu == "not run" else f"; {without_gpu}")
    return without_gpu


def _has_file(backend: str, op: str) -> bool:
    """Whether the backend has the op, be its library installed here or not."""
    module = Path(__file__).parents[2] / dispatch.BACKENDS[backend].replace(".", "/") / op
    return module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
