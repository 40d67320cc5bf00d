"""What the recipes of this folder print: the same training by the framework alone and with rlkernel.

`measured(GRPOTrainer)` is the trainer as it is, looked at from outside. `compare` runs a recipe once for each
mode, in fresh processes, so that no run finds memory or caches of another; `show` prints both: reward curves,
how far the log-probabilities are apart as long as both runs sample the same tokens, time, and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import arithmetic

MODES = ("stock", "patched")
MIB = 1 << 20
# with --short; as in the long form, a step has every question of the task once, for eight answers
SHORT = {"steps": 12, "batch": 128, "largest": 3, "vocabulary": 8192}


# One run


class PeakMemory:
    """Memory above that of `start()`, at its highest until `stop()`: of the GPU, or resident (Linux)."""

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}")

    def start(self) -> None:
        if gpu := _gpu():
            gpu.reset_peak_memory_stats()
            self.before = gpu.memory_allocated()
            return
        # Freed blocks that glibc keeps count as resident: the next peak would hide in the last one.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.before = self._status("VmRSS")

    def stop(self) -> int:
        gpu = _gpu()
        return (gpu.max_memory_allocated() if gpu else self._status("VmHWM")) - self.before


def _gpu() -> Any:
    """torch.cuda where this process uses it."""
    import torch

    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def now() -> float:
    """Seconds, with what a GPU has still to do."""
    if gpu := _gpu():
        gpu.synchronize()
    return time.perf_counter()


def measured(base: Any, mode: str, args: argparse.Namespace) -> Any:
    """A trainer class of TRL as it is, whose instances have a `record` of what was seen step by step, and
    `scored`: ids and log-probabilities of every pass."""
    import transformers
    from transformers import PrinterCallback, TrainerCallback

    import rlkernel

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    class Progress(TrainerCallback):  # type: ignore[misc]
        def __init__(self, record: dict[str, Any]) -> None:
            self.record = record

        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" not in logs:
                return
            for name in ("reward", "loss", "grad_norm", "kl"):
                if name in logs:
                    self.record.setdefault(name, []).append(float(logs[name]))
            if state.global_step % args.every == 0 and state.is_world_process_zero:
                recent = statistics.fmean(self.record["reward"][-args.every :])
                say(args, f"  {mode:7} step {state.global_step:>3} of {args.steps}   reward {recent:.3f}")

    class MeasuredTrainer(base):
        peak = PeakMemory()

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.record: dict[str, Any] = {"step_seconds": [], "loss_seconds": [], "peak_bytes": []}
            self.scored: list[tuple[Any, Any]] = []
            super().__init__(*arguments, **options)
            self.remove_callback(PrinterCallback)
            self.add_callback(Progress(self.record))

        def training_step(self, *inputs: Any, **options: Any) -> Any:
            begin = now()
            loss = super().training_step(*inputs, **options)
            end = now()
            self.record["peak_bytes"].append(self.peak.stop())
            self.record["step_seconds"].append(end - begin)
            self.record["loss_seconds"].append(end - self.sampled)
            return loss

        def _prepare_inputs(self, batch: Any) -> Any:
            inputs = super()._prepare_inputs(batch)  # samples the completions and computes their rewards
            if mode == "patched":  # a workspace that is there already would not show in the peak
                rlkernel.workspace.release()
            self.peak.start()
            self.sampled = now()
            return inputs

        def _get_per_token_logps_and_entropies(
            self, model: Any, ids: Any, mask: Any, length: int, *rest: Any, **options: Any
        ) -> Any:
            scores = super()._get_per_token_logps_and_entropies(model, ids, mask, length, *rest, **options)
            logprobs = scores[0].detach().where(mask[:, -length:].bool(), 0)
            self.scored.append((ids.cpu(), logprobs.cpu()))
            return scores

    MeasuredTrainer.__name__ = base.__name__  # which TRL and its reports name
    return MeasuredTrainer


def config(mode: str, folder: Path, args: argparse.Namespace, **settings: Any) -> Any:
    """TRL's GRPOConfig with `settings`; else what all recipes have: the command line's, and no reports."""
    import torch
    from trl import GRPOConfig

    common = {
        "output_dir": str(folder / mode),
        "per_device_train_batch_size": args.batch,
        "num_generations": 8,
        "max_completion_length": arithmetic.ANSWER,
        "max_steps": args.steps,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "logging_steps": 1,
        "seed": args.seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**common, **settings})


def bounded(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """rlkernel's workspace, small on a CPU: its own limit there is more than these models need at all."""
    import torch

    import rlkernel

    if args.workspace is None and torch.cuda.is_available():
        return contextlib.nullcontext()
    return rlkernel.workspace.limited((args.workspace or 32) * MIB)


def told(patch: Any) -> dict[str, Any]:
    """What an active patch has done."""
    import rlkernel

    return {
        "calls": dict(patch.calls),
        "fallbacks": dict(patch.fallbacks),
        "backend": rlkernel.last_backend("linear_logprob"),
    }


# The two together


def warmed_up(folder: Path, args: argparse.Namespace) -> float:
    """The model of the command line, made and taught in `folder`; the expected reward of its samples."""
    names = ("largest", "vocabulary", "hidden", "start", "seed")
    return arithmetic.warm_up(folder, **{name: getattr(args, name) for name in names})


def compare(
    args: argparse.Namespace,
    train: Callable[[str, Path, argparse.Namespace], Any],
    prepare: Callable[[Path, argparse.Namespace], float] = warmed_up,
    launcher: Sequence[str] = (sys.executable,),
    needs: Sequence[str] = ("trl",),
) -> dict[str, Any] | None:
    """`prepare` a model, `train` in each mode from it, each time in fresh processes; what both say.

    None in such a process, which is the same script with `--worker`. `needs` are the packages it imports."""
    if args.worker:
        trainer = train(args.worker, args.folder, args)
        if trainer.is_world_process_zero():
            import torch

            torch.save(trainer.scored, args.folder / f"{args.worker}.pt")
            (args.folder / f"{args.worker}.json").write_text(json.dumps(trainer.record))
        return None
    need(*needs)
    name = Path(sys.argv[0]).name
    import torch

    torch.set_num_threads(args.threads)
    begin = time.perf_counter()
    script = str(Path(sys.argv[0]).resolve())
    if not getattr(args, "model", None):
        os.environ["HF_HUB_OFFLINE"] = "1"
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed, where it is installed, warns that it finds none
    environment = {
        "OMP_WAIT_POLICY": "passive",  # on a busy machine, spinning threads slow both runs by far
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # of transformers about its own arguments, through TRL
    }
    with tempfile.TemporaryDirectory(prefix="before-after-") as made:
        folder = Path(made)
        result: dict[str, Any] = {"start": prepare(folder, args)}
        seconds = time.perf_counter() - begin
        if result["start"]:
            say(args, f"Warm-up done in {seconds:.0f} s; {result['start']:.2f} of samples are right.")
        for mode in MODES:
            command = [*launcher, script, *sys.argv[1:], "--worker", mode, "--folder", str(folder)]
            try:
                subprocess.run(command, env=environment, check=True)
            except CalledProcessError as error:
                raise SystemExit(f"{name}: the run {mode} failed, status {error.returncode}") from None
            result[mode] = json.loads((folder / f"{mode}.json").read_text())
            result[mode]["summary"] = summary(result[mode])
        stock, patched = (torch.load(folder / f"{mode}.pt") for mode in MODES)
    result["logprobs"] = logprob_differences(stock, patched)
    result["seconds"] = time.perf_counter() - begin
    result["settings"] = {key: value for key, value in vars(args).items() if isinstance(value, int | float)}
    return result


def logprob_differences(stock: list[Any], patched: list[Any]) -> dict[str, Any]:
    """Largest logprob differences: in the first pass, and in all until the runs see different tokens."""
    import torch

    differences = []
    for passes in zip(stock, patched, strict=True):
        # samples may stand in another order
        (ids, logprobs), (others, other_logprobs) = (
            (found[order], scores[order])
            for found, scores in passes
            for order in [sorted(range(len(found)), key=found.tolist().__getitem__)]
        )
        if not torch.equal(ids, others):
            break  # one sample fell the other way; from here on the runs go their own ways
        differences.append((logprobs - other_logprobs).abs().max().item())
    return {
        "passes": len(stock),
        "same_tokens": len(differences),
        "first": differences[0] if differences else None,
        "largest": max(differences, default=None),
    }


def summary(record: dict[str, Any]) -> dict[str, float]:
    """Medians and the highest peak of a run."""
    return {
        "step_seconds": statistics.median(record["step_seconds"]),
        "loss_seconds": statistics.median(record["loss_seconds"]),
        "peak_mib": max(record["peak_bytes"]) / MIB,
    }


def curve(rewards: list[float], every: int) -> list[float]:
    return [statistics.fmean(rewards[i : i + every]) for i in range(0, len(rewards), every)]


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    curves = [curve(result[mode]["reward"], args.every) for mode in MODES]
    begin = f", from {result['start']:.2f}" if result["start"] else ""
    print(f"\nReward, mean of {args.every} steps of {args.batch} completions{begin}\n")
    print(f"{'steps':>9}   {'stock':<28}patched")
    for i, values in enumerate(zip(*curves, strict=True)):
        steps = f"{i * args.every + 1}-{min((i + 1) * args.every, args.steps)}"
        cells = "".join(f"{value:.3f} {'#' * round(20 * value):<22}" for value in values)
        print(f"{steps:>9}   {cells}".rstrip())

    print(f"\n{'':40}{'stock':>9}{'patched':>9}{'ratio':>8}")
    for label, key, scale in (
        ("step, median, ms", "step_seconds", 1e3),
        ("  of it loss and its gradient, ms", "loss_seconds", 1e3),
        ("peak extra memory of these two, MiB", "peak_mib", 1),
    ):
        stock, patched = (result[mode]["summary"][key] * scale for mode in MODES)
        print(f"{label:40}{stock:>9.0f}{patched:>9.0f}{stock / patched:>7.1f}x")
    (step, peak), (step_after, peak_after) = (
        (result[mode]["summary"]["step_seconds"], result[mode]["summary"]["peak_mib"]) for mode in MODES
    )
    faster = "less" if step_after < step else "more"
    print(
        f"\nSaved: {peak - peak_after:.0f} MiB. A step takes {1e3 * abs(step - step_after):.0f} ms {faster}."
    )

    logprobs, patched = result["logprobs"], result["patched"]
    same = logprobs["same_tokens"]
    if same:
        first = logprobs["first"]
        print(f"Largest logprob difference in the first pass, whose weights are the same: {first:.1e}.")
    print(f"The runs sampled the same tokens in the first {same} of {logprobs['passes']} passes.")
    calls = ", ".join(f"{name} {count} times" for name, count in patched["calls"].items())
    left = ", ".join(f"{name} {count} times" for name, count in patched["fallbacks"].items())
    print(f"rlkernel ran for {calls or 'no call'} on backend {patched['backend']}.")
    print(f"Left to TRL: {left or 'nothing'}.")


def say(args: argparse.Namespace, line: str) -> None:
    if not args.quiet:
        print(line, flush=True)


# Command lines


def need(*packages: str) -> None:
    """End with one line that says what to install, where one of these packages is not here."""
    roots = {
        package: package.partition(".")[0] for package in packages
    }  # find_spec imports what is above one
    if missing := [package for package in packages if importlib.util.find_spec(roots[package]) is None]:
        name = Path(sys.argv[0]).name
        wanted = " ".join({"swift": "ms-swift"}.get(package, package) for package in missing)
        raise SystemExit(f"{name} needs packages that are not here: pip install {wanted}")


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace, *none: str) -> argparse.Namespace:
    """The arguments, where counts are 1 or more (of ``none`` 0 or more) and a report has a folder."""
    for name, given in vars(args).items():
        least = 0 if name in none else 1
        for count in given if isinstance(given, list) else [given]:
            if type(count) is int and count < least:
                parser.error(f"--{name.replace('_', '-')} must be {least} or more, got {count}")
    report = getattr(args, "json", None)
    if report and not report.resolve().parent.is_dir():
        parser.error(f"--json must name a file in a folder that is there, got {report}")
    return args


def options(description: str, steps: int, batch: int) -> argparse.ArgumentParser:
    """Those that all recipes have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="fewer and smaller steps")
    parser.add_argument(
        "--steps", type=int, default=steps, help="GRPO steps of each run (default %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=batch, help="completions a step (default %(default)s)")
    parser.add_argument("--every", type=int, help="steps a line of the curve (default: an eighth)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="rows of the head")
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--largest", type=int, default=5, help="largest number to add, at most 9")
    parser.add_argument("--start", type=float, default=0.3, help="expected reward that ends the warm-up")
    parser.add_argument(
        "--workspace", type=int, help="rlkernel's, in MiB (default: 32 on a CPU, the library's own on a GPU)"
    )
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure, step by step, to this file")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None, **short: Any) -> argparse.Namespace:
    """With the defaults ``short`` where ``--short`` is given."""
    if parser.parse_args(arguments).short:
        parser.set_defaults(**short)
    args = parser.parse_args(arguments)
    prompts = (args.largest + 1) ** 2
    for wrong, text in (
        (not 0 <= args.largest <= 9, f"--largest must be from 0 to 9, got {args.largest}"),
        (args.steps < 1, f"--steps must be 1 or more, got {args.steps}"),
        (args.batch < 8 or args.batch % 8, f"--batch must be a multiple of 8, got {args.batch}"),
        (  # TRL makes no step of fewer prompts than a batch has
            args.batch > 8 * prompts,
            f"--batch must be at most 8 x the {prompts} sums up to {args.largest}, got {args.batch}",
        ),
    ):
        if wrong:
            parser.error(text)
    checked(parser, args, "largest", "seed")
    args.every = args.every or max(1, args.steps // 8)
    return args


def report(result: dict[str, Any] | None, args: argparse.Namespace) -> None:
    """Print what `compare` found, and write it where it was asked for."""
    if result is None:
        return
    show(result, args)
    say(args, f"The whole took {result['seconds']:.0f} s on {args.threads} threads.")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
