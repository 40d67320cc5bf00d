"""A PPO step by verl's own functions: its fused head, advantages and policy loss, stock and patched.

    python examples/verl_step.py                                  # a minute
    python examples/verl_step.py --length 512 --vocabulary 65536
    python examples/verl_step.py --device cuda                    # on a GPU
    python examples/verl_step.py --json result.json               # every figure, step by step

The model is a random Qwen2, made on the spot, with the forward that verl gives it under
`use_fused_kernels=True` and the backend "torch"; the sequences are random and the same in both runs, each of
which has a process of its own. A step is the old log-probabilities, the advantages of GRPO, the
log-probabilities and entropies with their graph, the clipped loss, the backward pass and the optimizer.
"""

from __future__ import annotations

import argparse
from typing import Any

import apart

NEEDED = ("verl",)
MODES = ("stock", "patched")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import numpy as np
    import torch
    from verl.models.transformers.monkey_patch import patch_forward_with_backends
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    import rlkernel

    torch.set_num_threads(args.threads)
    model = apart.make_qwen(args)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model.to(args.device, dtype)
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    if mode == "patched":
        rlkernel.patch_verl()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config = ActorConfig(strategy="fsdp", rollout_n=args.samples, ppo_micro_batch_size_per_gpu=args.samples)
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g).to(args.device)
        rewards = torch.zeros(args.samples, args.length - 1)
        rewards[:, -1] = torch.rand(args.samples, generator=g)
        rewards = rewards.to(args.device)
        mask, names = torch.ones_like(rewards), np.array(["prompt"] * args.samples, dtype=object)
        with steps.measured():
            with torch.no_grad():
                old = model(input_ids=ids, return_dict=True, use_cache=False).log_probs[:, :-1]
            advantages, _ = core_algos.get_adv_estimator_fn("grpo")(rewards, mask, names)
            out = model(input_ids=ids, return_dict=True, use_cache=False)
            logprobs, entropy = out.log_probs[:, :-1], out.entropy[:, :-1]
            loss, _ = core_algos.get_policy_loss_fn("vanilla")(old, logprobs, advantages, mask, config=config)
            loss = loss - 1e-3 * core_algos.agg_loss(entropy, mask, "token-mean")
            apart.update(optimizer, loss)
        steps.scored(logprobs)
    return steps.found


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
