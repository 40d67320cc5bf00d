"""Teach a small transformer to add, with TRL's GRPOTrainer: once as it is, once under rlkernel.patch_trl().

    python examples/grpo_arithmetic.py             # the whole curve, several minutes on two cores
    python examples/grpo_arithmetic.py --short     # its beginning, about a minute; `make bench` runs this
    python examples/grpo_arithmetic.py --short --batch-invariant     # and the KL of rollout and trainer is 0

Everything is made on the spot: a character tokenizer, a two-layer Qwen2 whose vocabulary is padded to 32,768
rows, so that the head weighs as much as it does in a real model, and the sums up to 5+5. A supervised warm-up
of a second or two teaches the format and some of the sums. Both runs then start from the same weights and the
same seed, each in a process of its own, and GRPO has one reward: 1 if the completion is the sum, else 0.

A reader sees the reward of both runs rise, how far their logprobs are apart as long as they sample the same
tokens, the time of a step, the time of the loss and its gradient within it, and the memory that these two
took at their peak. The ratios are those of a CPU, where TRL folds each tile of logits with torch operators;
on a GPU it has Triton kernels for that. With `--batch-invariant` the second run is
under `rlkernel.patch_trl(batch_invariant=True)`, and both say how far the trainer's log-probability of each
sampled token is from the one that it was sampled with.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+="
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS = 0, 1, 2
PROMPT, ANSWER = 4, 3  # tokens: "7+8=" and "15<eos>"
MODES = ("stock", "patched")
MIB = 1 << 20


# The task


def sums(largest: int) -> list[tuple[str, str]]:
    return [(f"{a}+{b}=", str(a + b)) for a in range(largest + 1) for b in range(largest + 1)]


def correct_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: add the two numbers of the prompt and compare."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        a, b = prompt.rstrip("=").split("+")
        rewards.append(float(completion == str(int(a) + int(b))))
    return rewards


# The model


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(SPECIAL + list(CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_model(vocabulary: int, hidden: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def warm_up(folder: Path, args: argparse.Namespace) -> float:
    """Supervised training until a sample's expected reward is `args.start`; the model is saved."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer, model = make_tokenizer(), make_model(args.vocabulary, args.hidden)
    rows = [tokenizer(question + answer)["input_ids"] + [EOS] for question, answer in sums(args.largest)]
    ids = torch.tensor([row + [PAD] * (PROMPT + ANSWER - len(row)) for row in rows])
    targets, scored = ids[:, PROMPT:], (ids[:, PROMPT:] != PAD).float()

    used = len(tokenizer)
    head = model.lm_head.weight
    head.data[used:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    while True:
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[:, PROMPT - 1 :]
        logits = hidden @ head[:used].T
        # The padding rows are zero, and so are their logits: together they add a constant to the softmax.
        padding = torch.full_like(logits[..., :1], math.log(args.vocabulary - used))
        logprobs = torch.cat([logits, padding], -1).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        logprobs = logprobs * scored
        expected = logprobs.sum(-1).exp().mean().item()
        if expected >= args.start:
            break
        (-logprobs.sum() / scored.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return expected


# One run


class PeakMemory:
    """Resident memory above that of `start()`, at its highest until `stop()` (Linux)."""

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}")

    def start(self) -> None:
        # Freed blocks that glibc keeps count as resident: the next peak would hide in the last one.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.before = self._status("VmRSS")

    def stop(self) -> int:
        return self._status("VmHWM") - self.before


def watch_rollout(model: Any) -> list[dict[tuple[int, ...], Any]]:
    """From now on, of each `model.generate` the texts, and the log-probabilities that their tokens had."""
    import torch

    import rlkernel

    generate, rollouts = model.generate, []

    def generate_and_remember(*arguments: Any, **options: Any) -> Any:
        found = generate(*arguments, **options, output_logits=True, return_dict_in_generate=True)
        drawn = found.sequences[:, -len(found.logits) :]
        scores = [rlkernel.logprob(logits, drawn[:, i]).logprobs for i, logits in enumerate(found.logits)]
        rollouts.append(dict(zip(map(tuple, found.sequences.tolist()), torch.stack(scores, 1), strict=True)))
        return found.sequences

    model.generate = generate_and_remember
    return rollouts


def against_rollout(
    scored: list[tuple[Any, Any]], rollouts: list[dict[tuple[int, ...], Any]]
) -> dict[str, Any]:
    """The trainer's log-probabilities against those of the rollout, of all tokens up to the end of a text."""
    import torch

    import rlkernel

    trained, rolled = [], []
    for (ids, logprobs), sampled in zip(scored, rollouts, strict=True):
        for row, own in zip(ids.tolist(), logprobs, strict=True):
            ended = row[PROMPT:].index(EOS) + 1 if EOS in row[PROMPT:] else len(row) - PROMPT
            trained.append(own[:ended])
            rolled.append(sampled[tuple(row)][:ended])
    report = rlkernel.consistency.compare(torch.cat(trained)[None], torch.cat(rolled)[None])
    return {
        "tokens": report.tokens,
        "equal": report.equal,
        "max": report.max_abs_difference,
        "kl": report.kl.k3,
    }


def train(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One GRPO run in this process. Returns what it measured, step by step."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    record: dict[str, Any] = {"step_seconds": [], "loss_seconds": [], "peak_bytes": [], "reward": []}
    scored: list[tuple[Any, Any]] = []

    class MeasuredTrainer(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer as it is, looked at from outside."""

        peak = PeakMemory()

        def training_step(self, *inputs: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            loss = super().training_step(*inputs, **options)
            end = time.perf_counter()
            record["peak_bytes"].append(self.peak.stop())
            record["step_seconds"].append(end - begin)
            record["loss_seconds"].append(end - self.sampled)
            return loss

        def _prepare_inputs(self, batch: Any) -> Any:
            inputs = super()._prepare_inputs(batch)  # samples the completions and computes their rewards
            self.peak.start()
            self.sampled = time.perf_counter()
            return inputs

        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Any, *rest: Any, **options: Any
        ) -> Any:
            scores = super()._get_per_token_logps_and_entropies(model, input_ids, *rest, **options)
            scored.append((input_ids, scores[0].detach().clone()))
            return scores

    class Progress(TrainerCallback):  # type: ignore[misc]
        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" not in logs:
                return
            record["reward"].append(float(logs["reward"]))
            if state.global_step % args.every == 0:
                recent = statistics.fmean(record["reward"][-args.every :])
                say(args, f"  {mode:7} step {state.global_step:>3} of {args.steps}   reward {recent:.3f}")

    config = GRPOConfig(
        output_dir=str(folder / mode),
        per_device_train_batch_size=args.batch,
        num_generations=8,
        max_completion_length=ANSWER,
        max_steps=args.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=1,
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    with contextlib.ExitStack() as stack:
        if mode == "patched":
            import rlkernel

            stack.enter_context(rlkernel.workspace.limited(args.workspace * MIB))
            patch = stack.enter_context(rlkernel.patch_trl(batch_invariant=args.batch_invariant))
            say(args, f"  {patch}".replace("\n", "\n  "))
        trainer = MeasuredTrainer(
            model=str(folder),
            reward_funcs=correct_sum,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [question for question, _ in sums(args.largest)]}),
            processing_class=make_tokenizer(),
            callbacks=[Progress()],
        )
        trainer.remove_callback(PrinterCallback)
        rollouts = watch_rollout(trainer.model) if args.batch_invariant else []
        trainer.train()
        if args.batch_invariant:
            record["rollout"] = against_rollout(scored, rollouts)
        if mode == "patched":
            record["calls"], record["fallbacks"] = dict(patch.calls), dict(patch.fallbacks)
            record["backend"] = rlkernel.last_backend("linear_logprob")
    torch.save(scored, folder / f"{mode}.pt")
    return record


def run_apart(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`train` in a fresh process, so that neither run finds memory or caches of the other."""
    environment = {
        "OMP_WAIT_POLICY": "passive",  # on a busy machine, spinning threads slow both runs by far
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # of transformers about its own arguments, through TRL
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", mode, "--folder", str(folder)]
    subprocess.run(command, env=environment, check=True)
    return json.loads((folder / f"{mode}.json").read_text())


# The two together


def compare_logprobs(folder: Path) -> dict[str, Any]:
    """Largest logprob differences: in the first step, and in all until the runs see different tokens."""
    import torch

    stock, patched = (torch.load(folder / f"{mode}.pt") for mode in MODES)
    differences = []
    for (ids, logprobs), (other_ids, other_logprobs) in zip(stock, patched, strict=True):
        if not torch.equal(ids, other_ids):
            break  # one sample fell the other way; from here on the runs go their own ways
        differences.append((logprobs - other_logprobs).abs().max().item())
    return {
        "same_tokens_steps": len(differences),
        "first_step": differences[0] if differences else None,
        "same_tokens_max": max(differences, default=None),
    }


def curve(rewards: list[float], every: int) -> list[float]:
    return [statistics.fmean(rewards[i : i + every]) for i in range(0, len(rewards), every)]


def summary(record: dict[str, Any]) -> dict[str, float]:
    """Medians and the highest peak of a run."""
    return {
        "step_seconds": statistics.median(record["step_seconds"]),
        "loss_seconds": statistics.median(record["loss_seconds"]),
        "peak_mib": max(record["peak_bytes"]) / MIB,
    }


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    print(f"\nReward, mean of {args.every} steps of {args.batch} completions, from {result['start']:.2f}\n")
    print(f"{'steps':>9}   {'stock':<28}patched")
    curves = [curve(result[mode]["reward"], args.every) for mode in MODES]
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

    logprobs, patched = result["logprobs"], result["patched"]
    same = logprobs["same_tokens_steps"]
    print(f"\nBoth runs sampled the same tokens in the first {same} of {args.steps} steps.")
    if same:
        print(
            f"Largest logprob difference: {logprobs['first_step']:.1e} with the same weights (first step), "
            f"{logprobs['same_tokens_max']:.1e} over these {same}, as the weights drift apart."
        )
    if args.batch_invariant:
        for mode in MODES:
            r = result[mode]["rollout"]
            where = "patched, batch_invariant" if mode == "patched" else mode
            print(
                f"Trainer against rollout, {where}: {r['equal']} of {r['tokens']} log-probabilities are the "
                f"same number, largest difference {r['max']:.1e}, KL {r['kl']:.1e}."
            )
    calls = ", ".join(f"{name} {count} times" for name, count in patched["calls"].items())
    left = ", ".join(f"{name} {count} times" for name, count in patched["fallbacks"].items())
    print(f"rlkernel ran for {calls or 'no call'} on backend {patched['backend']}.")
    print(f"Left to TRL: {left or 'nothing'}.")


def say(args: argparse.Namespace, line: str) -> None:
    if not args.quiet:
        print(line, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="fewer and smaller steps")
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the second run is under patch_trl(batch_invariant=True)",
    )
    parser.add_argument("--steps", type=int, help="GRPO steps of each run (default 64; 24 with --short)")
    parser.add_argument("--largest", type=int, default=5, help="largest number to add, at most 9")
    parser.add_argument("--batch", type=int, help="completions a step (default 256; 128 with --short)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, help="steps a line of the curve (default: an eighth)")
    parser.add_argument("--json", type=Path, help="write every figure, step by step, to this file")
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument("--vocabulary", type=int, default=32768, help="rows of the head")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--start", type=float, default=0.3, help="expected reward that ends the warm-up")
    parser.add_argument("--workspace", type=int, default=32, help="rlkernel's workspace in MiB")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.steps = args.steps or (24 if args.short else 64)
    args.batch = args.batch or (128 if args.short else 256)
    args.every = args.every or max(1, args.steps // 8)
    return args


def main() -> None:
    args = parse()
    if args.worker:
        record = train(args.worker, args.folder, args)
        (args.folder / f"{args.worker}.json").write_text(json.dumps(record))
        return
    begin = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="grpo-arithmetic-") as name:
        folder = Path(name)
        result: dict[str, Any] = {"start": warm_up(folder, args)}
        seconds = time.perf_counter() - begin
        say(args, f"Warm-up done in {seconds:.0f} s; {result['start']:.2f} of samples are right.")
        for mode in MODES:
            result[mode] = run_apart(mode, folder, args)
            result[mode]["summary"] = summary(result[mode])
        result["logprobs"] = compare_logprobs(folder)
    result["seconds"] = time.perf_counter() - begin
    result["settings"] = {key: value for key, value in vars(args).items() if isinstance(value, int | float)}
    show(result, args)
    say(args, f"The whole took {result['seconds']:.0f} s on {args.threads} threads.")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
