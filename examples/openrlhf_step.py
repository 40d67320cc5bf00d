"""A step of GRPO by OpenRLHF's own actor and policy loss, stock and patched.

    python examples/openrlhf_step.py                                  # a minute
    python examples/openrlhf_step.py --length 512 --vocabulary 65536
    python examples/openrlhf_step.py --device cuda                    # on a GPU
    python examples/openrlhf_step.py --json result.json               # every figure, step by step

The model is a random Qwen2, made on the spot; the sequences are random and the same in both runs, each of
which has a process of its own. A step is the old log-probabilities, those with their graph, the entropies,
the clipped loss, the backward pass and the optimizer, each by OpenRLHF's functions. On a CPU
`pip install --no-deps openrlhf pylatexenc` is enough: of flash-attn, which OpenRLHF imports, samples that are
not packed use nothing, and something empty stands in for it where it is not there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import apart

NEEDED = ("openrlhf", "deepspeed", "peft", "pylatexenc")
MODES = ("stock", "patched")
PARTS = ("logprobs", "fused_head", "losses")  # the advantages live where Ray and vLLM are imported
OF_FLASH_ATTN = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


def stand_in_for_flash_attn() -> None:
    for name, functions in OF_FLASH_ATTN.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(dict.fromkeys(functions))


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch

    import rlkernel

    torch.set_num_threads(args.threads)
    os.environ["DS_ACCELERATOR"] = args.device  # of DeepSpeed, which OpenRLHF imports
    model = apart.make_qwen(args)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model.to(args.device, dtype)
    if importlib.util.find_spec("flash_attn") is None:
        stand_in_for_flash_attn()
    from openrlhf.models import Actor, PolicyLoss

    actor = Actor(model, temperature=0.9)
    actor.packing_samples = False  # which an actor knows that loads its model itself
    if mode == "patched":
        rlkernel.patch_openrlhf(PARTS)
    loss_of, optimizer = PolicyLoss(), torch.optim.SGD(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g).to(args.device)
        rewards = torch.rand(args.samples, generator=g).to(args.device)
        advantages = ((rewards - rewards.mean()) / rewards.std())[:, None].expand(-1, args.length - 1)
        actions, there = torch.ones_like(advantages, dtype=torch.bool), torch.ones_like(ids)
        with steps.measured():
            with torch.no_grad():
                old = actor(ids, actions, there)
            logprobs, output = actor(ids, actions, there, return_output=True, return_entropy=True)
            loss, *_ = loss_of(logprobs, old, advantages, actions)
            loss = loss - 1e-3 * output.entropy.mean()
            apart.update(optimizer, loss)
        steps.scored(logprobs)
        del output, loss, logprobs
    return steps.found


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
