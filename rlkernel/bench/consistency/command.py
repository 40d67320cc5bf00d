"""``consistency`` of the command line: runs the parts, writes the report, shows it."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlkernel.bench import amx, report
from rlkernel.bench.cases import UsageError
from rlkernel.bench.consistency import engines, models, operators, tables
from rlkernel.bench.progress import Progress

PARTS = ("operators", "models", "engines")
ON_A_GPU = ("models",)
NEEDS = {"models": "transformers", "engines": "vllm"}
DTYPES = ("float32", "bfloat16", "float16")
USUAL = ("float32", "bfloat16")
Step = tuple[str, str, Callable[[], dict[str, Any]]]  # the part, what is said of it, and what makes its row


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """0 when every bit that is promised holds, else 1."""
    _check(options)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads or 1)
    try:
        amx.avoid_broken_amx()
        stored = _measured(options, arguments)
    finally:
        torch.set_num_threads(threads)
    if options.json:
        _save(options.json, stored)
    if options.markdown:
        report.write(
            options.markdown,
            tables.markdown(stored),
        )
    if "-" not in (options.json, options.markdown):
        sys.stdout.write(tables.text(stored))
    broken = tables.broken(stored)
    for line in broken:
        print(f"rlkernel.bench: {line}", file=sys.stderr)
    return 1 if broken else 0


def _save(path: str, stored: dict[str, Any]) -> None:
    report.write(path, json.dumps(stored, indent=1) + "\n")


def _check(options: argparse.Namespace) -> None:
    for option, names, possible in (("--part", options.part, PARTS), ("--dtype", options.dtype, DTYPES)):
        for name in names:
            if name not in possible:
                raise UsageError(f"{option} must be of {', '.join(possible)}, got {name}")
    options.device = options.device or "cpu"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device must be one that torch finds here, cpu, got cuda")
        options.part = options.part or ON_A_GPU
        if set(options.part) != set(ON_A_GPU):
            raise UsageError(f"--part must be models with --device cuda, got {', '.join(options.part)}")
    for wanted in options.part:
        if not _able(wanted):
            raise UsageError(f"--part {wanted} must have {NEEDS[wanted]} installed, got none")


def _able(part: str) -> bool:
    return part not in NEEDS or importlib.util.find_spec(NEEDS[part]) is not None


def _measured(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    parts = options.part or tuple(part for part in PARTS if _able(part))
    steps = list(_steps(options, parts))
    found: dict[str, Any] = {part: [] for part in PARTS}
    settings = {
        "short": options.short,
        "clock": "CPU time"
        if torch.get_num_threads() == 1 and options.device == "cpu"
        else "wall-clock time",
        "operators": _sizes(operators, options)._asdict(),
        "models": _sizes(models, options)._asdict(),
    }
    stored = {"header": report.header(arguments, options.device), "settings": settings, **found}
    with Progress(len(steps)) as progress, torch.device(options.device):
        for part, name, measure in steps:
            progress.step(name)
            found[part].append(measure())
            if options.json and options.json != "-":  # who interrupts it keeps what there is
                _save(options.json, stored)
    return stored


def _sizes(part: Any, options: argparse.Namespace) -> Any:
    return part.SHORT if options.short else part.FULL


def _steps(options: argparse.Namespace, parts: tuple[str, ...]) -> Iterator[Step]:
    dtypes = [getattr(torch, name) for name in options.dtype or USUAL]
    least = 1 if options.short else 3

    def seconds(usual: float) -> float:
        return options.seconds or (0.01 if options.short else usual)

    for dtype in dtypes if "operators" in parts else ():
        for make in operators.cases(_sizes(operators, options), dtype):

            def of_operator(make: Any = make, dtype: torch.dtype = dtype) -> dict[str, Any]:
                return operators.measured(make(), dtype, seconds(0.1), least)

            yield "operators", f"{operators.name_of(make)} {dtype}", of_operator
    for part, module in (("models", models), ("engines", engines)):
        for family in module.FAMILIES if part in parts else ():
            for dtype in dtypes:

                def of_model(
                    module: Any = module, family: str = family, dtype: torch.dtype = dtype
                ) -> dict[str, Any]:
                    return module.measured(family, dtype, _sizes(models, options), seconds(1), least)

                yield part, f"{family} in {NEEDS[part]}, {dtype}", of_model
