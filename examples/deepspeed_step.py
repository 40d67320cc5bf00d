"""A PPO step of a DeepSpeed engine: logprobs by its logits, as DeepSpeed-Chat makes them, and by score().

    python examples/deepspeed_step.py                                  # a minute
    python examples/deepspeed_step.py --stage 3 --vocabulary 65536
    python examples/deepspeed_step.py --json result.json               # every figure, step by step

The engine is DeepSpeed's, on one rank over gloo; the model is a random Qwen2, made on the spot; the sequences
are random and the same in both runs, each of which has a process of its own. A step is the engine's call, the
logprobs, the clipped loss, ``engine.backward`` and ``engine.step``.
"""

from __future__ import annotations

import argparse
from typing import Any

import apart

NEEDED = ("transformers", "deepspeed")
MODES = ("stock", "score")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import deepspeed
    import torch

    import rlkernel
    from rlkernel.integrations import deepspeed as adapter

    torch.set_num_threads(args.threads)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one rank exchanges nothing
    store = f"file://{args.folder / mode}.store"
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, verbose=False, rank=0, world_size=1, init_method=store
    )
    model = apart.make_qwen(args)
    settings = {
        "train_micro_batch_size_per_gpu": args.samples,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps()
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g)
        advantages = torch.randn(args.samples, args.length - 1, generator=g)
        mask = torch.ones_like(advantages)
        with steps.measured():
            if mode == "score":
                logprobs = adapter.score(engine, ids, use_cache=False).logprobs
                loss = rlkernel.policy_loss(logprobs, None, advantages, mask, loss_type="ppo").loss
            else:
                logp = torch.nn.functional.log_softmax(engine(ids, use_cache=False).logits[:, :-1, :], dim=-1)
                logprobs = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
                del logp
                ratio = (logprobs - logprobs.detach()).exp()
                losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
                loss = (losses * mask).sum() / mask.sum()
            engine.backward(loss)
            engine.step()
        # the loss itself is the same whatever the policy, on-policy; this is not
        steps.scored(logprobs)
    return steps.found


def main() -> None:
    parser = apart.documented(__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="of ZeRO")
    apart.sizes(parser)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    apart.main(train, parser, MODES, NEEDED, DS_ACCELERATOR="cpu", **alone)


if __name__ == "__main__":
    main()
