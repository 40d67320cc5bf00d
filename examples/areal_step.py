"""A PPO step by AReaL's own FSDP engine and actor, stock and patched.

    python examples/areal_step.py                                  # a minute
    python examples/areal_step.py --length 512 --vocabulary 65536
    python examples/areal_step.py --device cuda                    # on a GPU
    python examples/areal_step.py --json result.json               # every figure, step by step

The model is a random Qwen2, made on the spot, and the sequences are random and the same in both runs, each of
which has a process of its own.  A step is what AReaL's trainer asks of its actor: the log-probabilities of
what was rolled out, the advantages, and an update with the clipped loss and the optimizer.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import apart

NEEDED = ("areal", "transformers")
MODES = ("stock", "patched")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch

    import rlkernel

    torch.set_num_threads(args.threads)
    if mode == "patched":
        rlkernel.patch_areal()
    engine = make_engine(args)
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        shape = args.samples, args.length
        answers = (torch.arange(args.length) >= args.length // 2).expand(shape)
        batch = {
            "input_ids": torch.randint(3, args.vocabulary, shape, generator=g),
            "attention_mask": torch.ones(shape, dtype=torch.bool),
            "loss_mask": answers,
            "logprobs": -torch.rand(shape, generator=g),
            "rewards": torch.randn(args.samples, generator=g),
            "versions": torch.where(answers, 0, -1),
        }
        batch = {name: x.to(engine.device) for name, x in batch.items()}
        with steps.measured():
            (logprobs,) = engine.compute_logp([batch])
            (batch,) = engine.compute_advantages([batch | {"prox_logp": logprobs}])
            engine.ppo_update([batch])
        steps.scored(logprobs)
    return steps.found


def make_engine(args: argparse.Namespace) -> Any:
    """AReaL's actor over its FSDP engine, in a group of this process alone."""
    import torch
    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, PPOActorConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.engine.fsdp_engine import FSDPPPOActor

    os.environ["LOCAL_RANK"] = "0"
    backend = "gloo" if args.device == "cpu" else "nccl"
    store = f"file://{args.folder.resolve()}/store-{args.worker}"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    config = PPOActorConfig(
        experiment_name="step", trial_name="step", path=save_model(args), attn_impl="sdpa",
        dtype="float32" if args.device == "cpu" else "bfloat16", optimizer=OptimizerConfig(lr=1e-4),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=args.samples * args.length), ppo_n_minibatches=1,
    )  # fmt: skip
    engine = FSDPPPOActor(config)
    engine.create_process_group(ParallelStrategy())
    engine.initialize(None, FinetuneSpec(1, args.samples, args.samples))
    return engine


def save_model(args: argparse.Namespace) -> str:
    """The model on the disk, where AReaL loads it from, with a tokenizer of one word; the path."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    path = Path(args.folder) / f"model-{args.worker}"
    apart.make_qwen(args).save_pretrained(path)
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(path)
    return str(path)


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
