"""GRPO with a model that ZeRO-3 or FSDP 2 spreads over two processes, stock and under patch_trl().

    python examples/grpo_sharded.py zero3             # both runs, and what they say side by side
    python examples/grpo_sharded.py fsdp2 --short     # a minute or two

Each run is a plain `accelerate launch` of this file with `zero3.yaml` or `fsdp2.yaml` beside it, as for a
script of your own. With `patch_trl(prefix_sharing=True)` a prompt runs once for its group, and every rank
makes as many passes as TRL would, whatever it could pack, because ranks gather parameters together.

Without GPUs the processes talk over gloo, and accelerate, which shards on GPUs alone, is told that CPUs are
some. Each process has its own part of the batch. The reward is 1 where the completion is the sum, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import arithmetic
import before_after

KINDS = ("zero3", "fsdp2")


def shard_on_cpus() -> None:
    """What a machine with GPUs needs nothing of."""
    import accelerate.state as state
    import torch

    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU)
    state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    with contextlib.suppress(ImportError):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for most of a minute


def train(mode: str, folder: Path, args: argparse.Namespace) -> Any:
    """One run in the processes that accelerate has started; the trainer, with what it has seen."""
    import torch

    if not torch.cuda.is_available():
        shard_on_cpus()
    from trl import GRPOTrainer

    import rlkernel

    torch.set_num_threads(args.threads)
    config = before_after.config(
        mode,
        folder,
        args,
        per_device_train_batch_size=args.batch // int(os.environ["WORLD_SIZE"]),
        learning_rate=1e-3,
        optim="adamw_torch",
        use_cpu=False,  # the device is the configuration's
        bf16=False,  # as there: both say what the products are in
        gradient_checkpointing=False,
    )
    with contextlib.ExitStack() as stack:
        if mode == "patched":
            stack.enter_context(before_after.bounded(args))
            patch = stack.enter_context(rlkernel.patch_trl(prefix_sharing=True))
        trainer = before_after.measured(GRPOTrainer, mode, args)(
            model=str(folder),
            reward_funcs=arithmetic.correct_sum,
            args=config,
            train_dataset=arithmetic.dataset(args.largest),
            processing_class=arithmetic.make_tokenizer(),
        )
        trainer.train()
        trainer.record["sharding"] = type(trainer.model_wrapped).__name__
        if mode == "patched":
            trainer.record |= before_after.told(patch)
            trainer.record["tokens a row"] = patch.prefix.ratio
    return trainer


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = before_after.options(__doc__, steps=24, batch=288)
    parser.add_argument("kind", choices=KINDS, help="how the model is spread")
    return before_after.parse(parser, arguments, **before_after.SHORT)


def main() -> None:
    args = parse()
    os.environ.setdefault("ACCELERATE_LOG_LEVEL", "error")
    config = Path(__file__).with_name(f"{args.kind}.yaml")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    needs = ("trl", "deepspeed") if args.kind == "zero3" else ("trl",)
    result = before_after.compare(args, train, launcher=launcher, needs=needs)
    before_after.report(result, args)
    if result:
        ratio = result["patched"]["tokens a row"]
        print(
            f"Sharded as {result['patched']['sharding']}; TRL had {ratio:.1f} tokens for each row that ran."
        )


if __name__ == "__main__":
    main()
