"""A step of DPO by LLaMA-Factory's own trainer, stock and patched.

    python examples/llamafactory_step.py                                  # a minute
    python examples/llamafactory_step.py --length 512 --vocabulary 65536
    python examples/llamafactory_step.py --device cuda                    # on a GPU
    python examples/llamafactory_step.py --json result.json               # every figure, step by step

The model is a random Qwen2, made on the spot, with a copy of it as the reference, and the sequences are
random and the same in both runs, each of which has a process of its own.  A step is what LLaMA-Factory's
trainer does with a batch of pairs: both models' log-probabilities, the loss and its logs, backward and the
optimizer.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import apart

NEEDED = ("llamafactory", "transformers", "trl")
MODES = ("stock", "patched")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch

    import rlkernel

    torch.set_num_threads(args.threads)
    if mode == "patched":
        rlkernel.patch_llamafactory()
    trainer = make_trainer(args)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g)
        prompts = (torch.arange(args.length) < args.length // 2).expand_as(ids)
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(prompts, -100),
        }
        batch = {name: x.to(trainer.args.device) for name, x in batch.items()}
        with steps.measured():
            loss, logs = trainer.get_batch_loss_metrics(trainer.model, batch)
            apart.update(optimizer, loss)
        steps.scored(torch.tensor(logs["logps/chosen"] / (args.length - args.length // 2)))
    return steps.found


def make_trainer(args: argparse.Namespace) -> Any:
    """LLaMA-Factory's trainer of pairs, with chosen and rejected answers in the halves of a batch."""
    import torch
    from llamafactory.hparams import FinetuningArguments, TrainingArguments
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    model = apart.make_qwen(args).to(torch.float32 if args.device == "cpu" else torch.bfloat16)
    return CustomDPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=TrainingArguments(output_dir=str(args.folder), use_cpu=args.device == "cpu", report_to=[]),
        finetuning_args=FinetuningArguments(stage="dpo", finetuning_type="full"),
        processor=None,
        tokenizer=None,
        data_collator=lambda rows: rows,
    )


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
