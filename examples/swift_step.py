"""A GRPO step by the trainer of ms-swift: its scores, advantages and loss with metrics, stock and patched.

    python examples/swift_step.py                                  # a minute
    python examples/swift_step.py --length 512 --vocabulary 65536
    python examples/swift_step.py --device cuda                    # on a GPU
    python examples/swift_step.py --json result.json               # every figure, step by step

The model is a random Qwen2, made on the spot; the sequences are random and the same in both runs, each of
which has a process of its own.  Half of each is the prompt.  A step is the old log-probabilities, the
advantages of the group, the loss with entropies and everything that SWIFT logs, the backward pass and the
optimizer, by methods of SWIFT's GRPO trainer, which has what they read of it and no data set.
"""

from __future__ import annotations

import argparse
import types
from typing import Any

import apart

NEEDED = ("swift", "trl")
MODES = ("stock", "patched")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers import grpo_trainer

    import rlkernel

    torch.set_num_threads(args.threads)
    if mode == "patched":
        rlkernel.patch_swift()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = apart.make_qwen(args).to(args.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer, answer = make_trainer(model, args), args.length // 2
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    weights = torch.ones(1, device=args.device)
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g).to(args.device)
        rewards = torch.rand(args.samples, 1, generator=g).to(args.device)
        mask = torch.ones(args.samples, answer, dtype=torch.bool, device=args.device)
        batch = GRPOBatch(
            completion_mask=mask, truncated_mask=torch.zeros_like(mask[:, 0]), logits_to_keep=answer,
            seq_lengths=mask.sum(-1), rollout_per_token_logps=None,
        )  # fmt: skip
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with steps.measured():
            with torch.no_grad():
                batch.old_per_token_logps = trainer._get_per_token_logps_and_entropies(
                    model, dict(inputs), batch
                )[0]
            advantages, _ = grpo_trainer.compute_advantages(rewards, weights, args.samples)
            batch.advantages = advantages[:, None].expand(-1, answer)
            loss, _ = trainer._compute_loss_and_metrics(model, dict(inputs), batch)
            apart.update(optimizer, loss)
        steps.scored(batch.old_per_token_logps)
    return steps.found


def make_trainer(model: Any, args: argparse.Namespace) -> Any:
    """SWIFT's trainer, with what the methods above read."""
    from accelerate import Accelerator
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    options = types.SimpleNamespace(
        per_device_train_batch_size=args.samples, log_entropy=True, top_entropy_quantile=1.0, delta=None,
        report_to=[],
    )  # fmt: skip
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        model=model, args=options, accelerator=Accelerator(cpu=args.device == "cpu"), temperature=1.0,
        model_kwarg_keys=("logits_to_keep", "use_cache"), dynamic_num_samples=False, compute_entropy=True,
        template=types.SimpleNamespace(padding_free=False, sequence_parallel_size=1), overlong_filter=False,
        beta=0.0, kl_in_reward=False, rollout_importance_sampling_mode=None, loss_type="grpo",
        log_rollout_offpolicy_metrics=False, disable_rollout_importance_sampling=True, epsilon_low=0.2,
        importance_sampling_level="token", epsilon_high=0.2, off_policy_sequence_mask_delta=None,
        sdar_loss_coef=0.0, chord_sft_iterator=None, _has_teacher=False,
    )  # fmt: skip
    return trainer


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
