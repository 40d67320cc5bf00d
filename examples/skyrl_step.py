"""A GRPO step by SkyRL's own model and functions: its wrapper, advantages and policy loss, stock and patched.

    python examples/skyrl_step.py                                  # a minute
    python examples/skyrl_step.py --length 512 --vocabulary 65536
    python examples/skyrl_step.py --device cuda                    # on a GPU
    python examples/skyrl_step.py --json result.json               # every figure, step by step

The model is a random Qwen2, made on the spot, in the wrapper of SkyRL's FSDP workers; the sequences are
random and the same in both runs, each of which has a process of its own.  Half of each is the prompt.  A step
is the old log-probabilities, the advantages of GRPO, the log-probabilities and entropies with their graph,
the clipped loss, the backward pass and the optimizer, as SkyRL's trainer and workers have them.
"""

from __future__ import annotations

import argparse
from typing import Any

import apart

NEEDED = ("skyrl",)
MODES = ("stock", "patched")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.config import AlgorithmConfig

    import rlkernel

    torch.set_num_threads(args.threads)
    if mode == "patched":
        rlkernel.patch_skyrl()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = HFModelWrapper(apart.make_qwen(args).to(args.device, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config, answer = AlgorithmConfig(use_entropy_loss=True), args.length // 2
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g).to(args.device)
        there = torch.ones_like(ids)
        rewards = torch.zeros(args.samples, answer)
        rewards[:, -1] = torch.rand(args.samples, generator=g)
        rewards, mask = rewards.to(args.device), there[:, -answer:].float()
        with steps.measured():
            with torch.no_grad():
                old = model(ids, answer, there)
            advantages, _ = ppo_utils.compute_advantages_and_returns(
                rewards, mask, ["prompt"] * args.samples, "grpo", config
            )
            advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
                advantages, mask, config.loss_reduction, args.samples, args.length
            )
            logprobs, output = model(ids, answer, there, return_output=True, compute_entropy=True)
            loss, _ = ppo_utils.PolicyLossRegistry.get("regular")(
                logprobs, old, advantages, config=config, loss_mask=mask
            )
            loss = loss - 1e-3 * masked_mean(output["entropy"][:, -answer - 1 : -1], mask)
            apart.update(optimizer, loss)
        steps.scored(logprobs)
    return steps.found


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
