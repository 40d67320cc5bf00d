"""GRPO with LoRA: TRL's GRPOTrainer and an adapter of PEFT, as they are and under rlkernel.patch_trl().

    python examples/grpo_lora.py              # a small model that learns to add, made on the spot
    python examples/grpo_lora.py --short      # its beginning: a minute or two
    python examples/grpo_lora.py --model Qwen/Qwen2.5-0.5B-Instruct --completion 8 --batch 32

Two lines are rlkernel's: the patch, and a bound for its memory. Everything else is TRL's and PEFT's. The
adapter is on all linear layers of attention and MLP. The reference of the KL penalty is the same model with
the adapter off, so each step scores its samples twice, both times through rlkernel. An adapter on the head
itself, `lm_head`, is an error in TRL with the patch and without: its loss multiplies by the head's weight,
and would not train what stands beside it.

Both runs start from the same weights and the same seed, each in a process of its own. The reward is 1 where
the completion is the sum, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import arithmetic
import before_after


def train(mode: str, folder: Path, args: argparse.Namespace) -> Any:
    """One run in this process; the trainer, with what it has seen."""
    import torch
    from peft import LoraConfig
    from trl import GRPOTrainer

    import rlkernel

    torch.set_num_threads(args.threads)
    config = before_after.config(
        mode,
        folder,
        args,
        max_completion_length=args.completion,
        learning_rate=args.lr or (1e-5 if args.model else 5e-3),
        beta=0.01,  # of the KL penalty, so that there is a reference
        bf16=torch.cuda.is_available(),
    )
    adapter = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=args.targets)
    with contextlib.ExitStack() as stack:
        if mode == "patched":
            stack.enter_context(before_after.bounded(args))
            patch = stack.enter_context(rlkernel.patch_trl())
        trainer = before_after.measured(GRPOTrainer, mode, args)(
            model=args.model or str(folder),
            peft_config=adapter,
            reward_funcs=arithmetic.correct_sum,
            args=config,
            train_dataset=arithmetic.dataset(args.largest),
        )
        trainer.train()
        if mode == "patched":
            trainer.record |= before_after.told(patch)
    trainer.record["trained"], trainer.record["parameters"] = trainer.model.get_nb_trainable_parameters()
    return trainer


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = before_after.options(__doc__, steps=24, batch=288)
    parser.add_argument("--model", help="of the hub or on the disk, in place of the one that is made")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument(
        "--targets", default="all-linear", help="modules that have an adapter, as PEFT names them"
    )
    parser.add_argument(
        "--completion", type=int, default=arithmetic.ANSWER, help="most tokens of a completion"
    )
    parser.add_argument("--lr", type=float, help="default 5e-3, or 1e-5 with --model")
    return before_after.parse(parser, arguments, **before_after.SHORT)


def main() -> None:
    args = parse()
    given = (lambda *_: 0.0) if args.model else before_after.warmed_up
    result = before_after.compare(args, train, given, needs=("trl", "peft"))
    before_after.report(result, args)
    if result:
        run = result["patched"]
        print(f"Trained: {run['trained']:,} of {run['parameters']:,} parameters, those of the adapter.")


if __name__ == "__main__":
    main()
