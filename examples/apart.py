"""What the examples share that measure each way of training in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from before_after import MIB, checked


def sizes(parser: argparse.ArgumentParser) -> None:
    """Arguments for a small random model and its sequences."""
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that is not")


def parse(parser: argparse.ArgumentParser, modes: Sequence[str]) -> argparse.Namespace:
    """The arguments, with those that every such example has."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure, step by step, to this file")
    parser.add_argument("--worker", choices=modes, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return checked(parser, parser.parse_args())


def make_qwen(args: argparse.Namespace) -> Any:
    """A random Qwen2 of these sizes, the same each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64, tie_word_embeddings=True,
        )
    )  # fmt: skip


def run(mode: str, args: argparse.Namespace, **environment: str) -> dict[str, Any]:
    """This script's ``mode`` in a fresh process, so that no run finds memory or caches of another."""
    inherited = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *sys.argv, "--worker", mode, "--folder", str(args.folder)]
    subprocess.run(command, env=inherited | environment, check=True, stdout=subprocess.DEVNULL)
    record: dict[str, Any] = json.loads((args.folder / f"{mode}.json").read_text())
    record["summary"] = {  # the first step warms caches up
        "step_seconds": statistics.median(record["step_seconds"][1:]),
        "cpu_seconds": statistics.median(record["cpu_seconds"][1:]),
        "peak_mib": max(record["peak_bytes"]) / MIB,
    }
    return record


def compare(
    modes: Sequence[str], args: argparse.Namespace, of_step: str, **environment: str
) -> dict[str, Any]:
    """The record of every mode, and how far ``of_step`` of the first and the last one are apart."""
    with tempfile.TemporaryDirectory(prefix=f"{Path(sys.argv[0]).stem}-") as name:
        args.folder = Path(name)
        result: dict[str, Any] = {mode: run(mode, args, **environment) for mode in modes}
    pairs = zip(result[modes[0]][of_step], result[modes[-1]][of_step], strict=True)
    result["logprob_difference"] = max(abs(a - b) for a, b in pairs)
    result["settings"] = {k: v for k, v in vars(args).items() if isinstance(v, int | float)}
    return result


def keep(record: dict[str, Any], args: argparse.Namespace) -> None:
    """What a worker leaves to ``run``."""
    (args.folder / f"{args.worker}.json").write_text(json.dumps(record))


def show(
    result: dict[str, Any],
    args: argparse.Namespace,
    markdown: Callable[[dict[str, Any]], str],
    device: str = "cpu",
) -> None:
    """Print the table, and write the report where ``--json`` says."""
    from rlkernel.bench import report

    head = report.header([], device) | {"threads": args.threads}
    head["command"] = shlex.join(["python", f"examples/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    result = {"header": head, **result}
    print(markdown(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
