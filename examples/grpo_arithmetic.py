"""Teach a small transformer to add, with TRL's GRPOTrainer: once as it is, once under rlkernel.patch_trl().

    python examples/grpo_arithmetic.py             # the whole curve, several minutes on two cores
    python examples/grpo_arithmetic.py --short     # its beginning, about a minute; `make bench` runs this
    python examples/grpo_arithmetic.py --short --batch-invariant     # and the KL of rollout and trainer is 0

Everything is made on the spot: a character tokenizer, a two-layer Qwen2 whose vocabulary is padded to 32,768
rows, so that the head weighs as much as it does in a real model, and the sums up to 5+5. A supervised warm-up
of a second or two teaches the format and some of the sums. Both runs then start from the same weights and the
same seed, each in a process of its own, and GRPO has one reward: 1 if the completion is the sum, else 0.

A reader sees the reward of both runs rise, how far their logprobs are apart with the same weights, the time
of a step, the time of the loss and its gradient within it, and the memory that these two took at their peak.
The ratios are those of a CPU, where TRL folds each tile of logits with torch operators; on a GPU it has
Triton kernels for that. With `--batch-invariant` the second run is under
`rlkernel.patch_trl(batch_invariant=True)`, and both say how far the trainer's log-probability of each sampled
token is from the one that it was sampled with.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import arithmetic
import before_after
from arithmetic import EOS, PROMPT
from before_after import MODES


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


def train(mode: str, folder: Path, args: argparse.Namespace) -> Any:
    """One GRPO run in this process; the trainer, with what it has seen."""
    import torch
    from trl import GRPOTrainer

    import rlkernel

    torch.set_num_threads(args.threads)
    config = before_after.config(mode, folder, args, learning_rate=1e-3, warmup_steps=10)
    with contextlib.ExitStack() as stack:
        if mode == "patched":
            stack.enter_context(before_after.bounded(args))
            patch = stack.enter_context(rlkernel.patch_trl(batch_invariant=args.batch_invariant))
            before_after.say(args, f"  {patch}".replace("\n", "\n  "))
        trainer = before_after.measured(GRPOTrainer, mode, args)(
            model=str(folder),
            reward_funcs=arithmetic.correct_sum,
            args=config,
            train_dataset=arithmetic.dataset(args.largest),
            processing_class=arithmetic.make_tokenizer(),
        )
        rollouts = watch_rollout(trainer.model) if args.batch_invariant else []
        trainer.train()
        if args.batch_invariant:
            trainer.record["rollout"] = against_rollout(trainer.scored, rollouts)
        if mode == "patched":
            trainer.record |= before_after.told(patch)
    return trainer


def show_rollout(result: dict[str, Any]) -> None:
    for mode in MODES:
        r = result[mode]["rollout"]
        where = "patched, batch_invariant" if mode == "patched" else mode
        print(
            f"Trainer against rollout, {where}: {r['equal']} of {r['tokens']} log-probabilities are the "
            f"same number, largest difference {r['max']:.1e}, KL {r['kl']:.1e}."
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = before_after.options(__doc__, steps=64, batch=256)
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the second run is under patch_trl(batch_invariant=True)",
    )
    return before_after.parse(parser, arguments, steps=24, batch=128)


def main() -> None:
    args = parse()
    result = before_after.compare(args, train)
    before_after.report(result, args)
    if result and args.batch_invariant:
        show_rollout(result)


if __name__ == "__main__":
    main()
