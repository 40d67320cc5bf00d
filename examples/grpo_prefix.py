"""One GRPO step of TRL's trainer with a long prompt, stock and under patch_trl(prefix_sharing=True).

    python examples/grpo_prefix.py                                # P=1024, L=64, G=16: a minute or two
    python examples/grpo_prefix.py --prompt 256 --completion 256  # where there is less to share
    python examples/grpo_prefix.py --json result.json             # every figure, step by step

The trainer and all that it does between two optimiser steps are real: the reference pass, the loss, its
gradient, the optimiser. Generation is not touched by the patch, so a rollout function hands the trainer
random completions instead, the same in all runs; step times are without it. The model is a random Qwen2, made
on the spot. Each run has a process of its own.

Three runs: "stock" is TRL alone, "head" is patch_trl(), "packed" adds prefix_sharing=True. A packed step has
P - 1 + G L rows for a group where TRL has G (P + L) tokens; the FLOP ratio counts layers, attention and the
rows that the lm_head scores (off GPUs, TRL scores the prompts' rows too).

On a GPU the runs train there, under autocast to bf16; `--hidden 896 --layers 24 --vocabulary 151936` is a
model of the size of Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import apart
from arithmetic import BOS, EOS, PAD, make_tokenizer
from before_after import MIB, PeakMemory, need, now

MODES = ("stock", "head", "packed")
HEAD_DIM = 64


def make_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = args.hidden // HEAD_DIM
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=args.prompt + args.completion,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def train(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Some GRPO steps in this process. Returns what it measured, step by step."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    samples = args.groups * args.group
    kept = ("step_seconds", "cpu_seconds", "reference_seconds", "peak_bytes", "loss")
    record: dict[str, Any] = {key: [] for key in kept}
    scored: list[Any] = []

    on_gpu = torch.cuda.is_available()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """For each prompt of the batch, which names it, the same random tokens in every run."""
        prompt_ids, completion_ids = [], []
        for n, prompt in enumerate(prompts):
            tokens = random.Random(f"prompt {prompt}")
            prompt_ids.append(tokens.choices(range(4, args.vocabulary), k=args.prompt))
            tokens = random.Random(f"completion {prompt} {n} {trainer.state.global_step}")
            completion_ids.append(tokens.choices(range(4, args.vocabulary), k=args.completion))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) / len(ids) / args.vocabulary for ids in completion_ids]

    class MeasuredTrainer(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer as it is, looked at from outside."""

        peak = PeakMemory()

        def training_step(self, *inputs: Any, **options: Any) -> Any:
            self.peak.start()
            loss = super().training_step(*inputs, **options)
            record["peak_bytes"].append(self.peak.stop())
            return loss

        def _get_per_token_logps_and_entropies(self, *inputs: Any, **options: Any) -> Any:
            begin = now()
            scores = super()._get_per_token_logps_and_entropies(*inputs, **options)
            if not torch.is_grad_enabled():
                record["reference_seconds"].append(now() - begin)
            scored.append(scores[0].detach().cpu().clone())
            return scores

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = now(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            record["step_seconds"].append(now() - self.begin[0])
            record["cpu_seconds"].append(time.process_time() - self.begin[1])

        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs:
                record["loss"].append(float(logs["loss"]))

    config = GRPOConfig(
        output_dir=str(folder / mode),
        per_device_train_batch_size=samples,
        num_generations=args.group,
        max_completion_length=args.completion,
        beta=0.04,
        max_steps=args.steps + 1,
        learning_rate=1e-4,
        gradient_checkpointing=args.checkpointing,
        logging_steps=1,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    with contextlib.ExitStack() as stack:
        if mode != "stock":
            import rlkernel

            patch = stack.enter_context(rlkernel.patch_trl(prefix_sharing=mode == "packed"))
        trainer = MeasuredTrainer(
            model=str(folder),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"{i}" for i in range(args.groups)]}),
            processing_class=make_tokenizer(),
            rollout_func=rollout,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if mode != "stock":
            record["calls"], record["fallbacks"] = dict(patch.calls), dict(patch.fallbacks)
            record["head_backend"] = rlkernel.last_backend("linear_logprob")
        if mode == "packed":
            record["attention_backend"] = rlkernel.last_backend("prefix_shared_attention")
            record["token_ratio"] = patch.prefix.ratio
    torch.save(scored[:2], folder / f"{mode}.pt")
    return record


def run_apart(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`train` in a fresh process, so that no run finds memory or caches of another."""
    environment = {
        "OMP_WAIT_POLICY": "passive",  # on a busy machine, spinning threads slow all runs by far
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",  # of rollout_func
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", mode, "--folder", str(folder)]
    subprocess.run(command, env=environment, check=True)
    record = json.loads((folder / f"{mode}.json").read_text())
    record["summary"] = {  # the first step warms caches up
        "step_seconds": statistics.median(record["step_seconds"][1:]),
        "cpu_seconds": statistics.median(record["cpu_seconds"][1:]),
        "reference_seconds": statistics.median(record["reference_seconds"][1:]),
        "peak_mib": max(record["peak_bytes"]) / MIB,
    }
    return record


def flops(args: argparse.Namespace, *, packed: bool) -> dict[str, float]:
    """Multiplications and additions of one forward pass over a group, by part of the model."""
    prompt, completion, group = args.prompt, args.completion, args.group
    rows = prompt - 1 + group * completion if packed else group * (prompt + completion)
    length = prompt + completion
    below = group * (completion * (prompt - 1) + completion**2 / 2)  # keys that completion rows see
    keys = (prompt - 1) ** 2 / 2 + below if packed else group * length**2 / 2
    heads = args.hidden // HEAD_DIM
    kv = max(1, heads // 2)
    weights = args.hidden * HEAD_DIM * (2 * heads + 2 * kv) + 3 * args.hidden * 3 * args.hidden
    scored = group * completion if packed else rows
    return {
        "layers": 2.0 * args.layers * weights * rows,
        "attention": 4.0 * args.layers * heads * HEAD_DIM * keys,
        "head": 2.0 * args.vocabulary * args.hidden * scored,
    }


def compare_logprobs(folder: Path) -> float:
    """Largest difference of the logprobs of the first step, of the reference and of the policy."""
    import torch

    stock, packed = (torch.load(folder / f"{mode}.pt") for mode in ("stock", "packed"))
    return max((a - b).abs().max().item() for a, b in zip(stock, packed, strict=True))


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"\nPrompt of {args.prompt} tokens, {args.group} completions of {args.completion}, "
        f"{args.groups} such group(s) a step; {args.threads} thread(s), {result['settings']['dtype']}\n"
    )
    print(f"{'':40}" + "".join(f"{mode:>9}" for mode in MODES) + f"{'stock / packed':>17}")
    for label, key in (
        ("TRL step without generation, s", "step_seconds"),
        ("  of it the reference pass, s", "reference_seconds"),
        ("CPU time of the step, all threads, s", "cpu_seconds"),
        ("peak extra memory of the step, MiB", "peak_mib"),
    ):
        values = [result[mode]["summary"][key] for mode in MODES]
        cells = "".join(f"{value:>9.{0 if key == 'peak_mib' else 2}f}" for value in values)
        print(f"{label:40}{cells}{values[0] / values[-1]:>16.2f}x")
    for label, key in (
        ("tokens", "token_ratio"),
        ("FLOPs", "flop_ratio"),
        ("FLOPs without the head", "body_ratio"),
    ):
        print(f"{label:40}{'':27}{result[key]:>16.2f}x")
    packed = result["packed"]
    print(f"\nLargest logprob difference in the first step: {result['logprob_difference']:.1e}.")
    print(f"Losses: stock {result['stock']['loss']}, packed {packed['loss']}.")
    left = ", ".join(f"{name} {count} times" for name, count in packed["fallbacks"].items())
    print(f"Attention on backend {packed['attention_backend']}; left to TRL: {left or 'nothing'}.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt, P")
    parser.add_argument("--completion", type=int, default=64, help="tokens of each completion, L")
    parser.add_argument("--group", type=int, default=16, help="completions of a prompt, G")
    parser.add_argument("--groups", type=int, default=1, help="prompts a step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that is not")
    parser.add_argument("--hidden", type=int, default=256, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing")
    return apart.parse(parser, MODES)


def main() -> None:
    args = parse()
    need("trl")
    if args.worker:
        record = train(args.worker, args.folder, args)
        (args.folder / f"{args.worker}.json").write_text(json.dumps(record))
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grpo-prefix-") as name:
        folder = Path(name)
        make_model(args).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        for mode in MODES:
            result[mode] = run_apart(mode, folder, args)
        result["logprob_difference"] = compare_logprobs(folder)
    dense, packed = (flops(args, packed=each) for each in (False, True))
    result["token_ratio"] = result["packed"]["token_ratio"]
    result["flop_ratio"] = sum(dense.values()) / sum(packed.values())
    result["body_ratio"] = (dense["layers"] + dense["attention"]) / (packed["layers"] + packed["attention"])
    on_gpu = torch.cuda.is_available()
    result["settings"] = {key: value for key, value in vars(args).items() if isinstance(value, int | float)}
    result["settings"]["dtype"] = "bf16" if on_gpu else "fp32"
    show(result, args)
    if args.json:
        from rlkernel.bench import report

        head = report.header([], "cuda" if on_gpu else "cpu") | {"threads": args.threads}
        head["command"] = shlex.join(["python", "examples/grpo_prefix.py", *sys.argv[1:]])
        args.json.write_text(json.dumps({"header": head, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
