"""What the examples share that measure each way of training in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from before_after import MIB, PeakMemory, checked, need


def sizes(parser: argparse.ArgumentParser) -> None:
    """Arguments for a small random model and its sequences."""
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that is not")


def documented(text: str | None) -> argparse.ArgumentParser:
    """A parser that shows an example's own words."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="fp32, or on a GPU bf16")


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


class Steps:
    """What the steps of this process take: time, memory, and the mean of the log-probabilities of each."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.peak = device, PeakMemory()
        self.found: dict[str, list[float]] = {
            name: [] for name in ("step_seconds", "cpu_seconds", "peak_bytes", "logprob")
        }

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        self.peak.start()
        begin = time.perf_counter(), time.process_time()
        yield
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()
        self.found["step_seconds"].append(time.perf_counter() - begin[0])
        self.found["cpu_seconds"].append(time.process_time() - begin[1])
        self.found["peak_bytes"].append(self.peak.stop())

    def scored(self, logprobs: Any) -> None:
        self.found["logprob"].append(logprobs.detach().double().mean().item())


def update(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


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


def compare(modes: Sequence[str], args: argparse.Namespace, **environment: str) -> dict[str, Any]:
    """The record of every mode, and how far the log-probabilities of the first and the last are apart."""
    with tempfile.TemporaryDirectory(prefix=f"{Path(sys.argv[0]).stem}-") as name:
        args.folder = Path(name)
        result: dict[str, Any] = {mode: run(mode, args, **environment) for mode in modes}
    pairs = zip(*(result[mode]["logprob"] for mode in (modes[0], modes[-1])), strict=True)
    result["logprob_difference"] = max(abs(a - b) for a, b in pairs)
    result["settings"] = {k: v for k, v in vars(args).items() if isinstance(v, int | float)}
    return result


def main(
    train: Callable[[str, argparse.Namespace], dict[str, Any]],
    parser: argparse.ArgumentParser,
    modes: Sequence[str],
    needed: Sequence[str],
    **environment: str,
) -> None:
    """Train in each mode, print the table, and write the report where ``--json`` says."""
    args = parse(parser, modes)
    need(*needed)
    if args.worker:  # what ``run`` reads
        (args.folder / f"{args.worker}.json").write_text(json.dumps(train(args.worker, args)))
        return
    device = getattr(args, "device", "cpu")
    result = compare(modes, args, **environment)
    result["settings"]["dtype"] = "fp32" if device == "cpu" else "bf16"
    from rlkernel.bench import example_tables, report

    name = Path(sys.argv[0]).stem
    head = report.header([], device) | {"threads": args.threads}
    head["command"] = shlex.join(["python", f"examples/{name}.py", *sys.argv[1:]])
    result = {"header": head, **result}
    print(getattr(example_tables, name)(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def steps_of(
    train: Callable[[str, argparse.Namespace], dict[str, Any]],
    text: str | None,
    modes: Sequence[str],
    needed: Sequence[str],
) -> None:
    """The same for an example whose arguments are sizes and a device, and which shows its own words."""
    parser = documented(text)
    sizes(parser)
    device(parser)
    main(train, parser, modes, needed)
