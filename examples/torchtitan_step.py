"""A step of GRPO by a model and the losses of torchtitan, with its chunked loss and with FusedLoss.

    python examples/torchtitan_step.py                                    # a minute
    python examples/torchtitan_step.py --length 512 --vocabulary 65536
    python examples/torchtitan_step.py --device cuda                      # on a GPU
    python examples/torchtitan_step.py --json result.json                 # every figure, step by step

The model is torchtitan's Qwen 3 with random weights, and the sequences are random and the same in both runs,
each of which has a process of its own.  A step is what torchtitan's trainer of RL does with a batch: hidden
states, log-probabilities and entropies of the completions, GRPO's loss and its metrics, backward and the
optimizer.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import apart

NEEDED = ("torchtitan",)
MODES = ("stock", "fused")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch

    torch.set_num_threads(args.threads)
    model, loss = make_model(args), make_loss(mode)
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    # Adam takes a gradient that is the rounding of nothing for a step like all others
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    shape = args.samples, args.length
    completions = (torch.arange(args.length) >= args.length // 2).expand(shape).contiguous()
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        tokens = torch.randint(args.vocabulary, (args.samples, args.length + 1), generator=g)
        batch = {
            "generator_logprobs": torch.full(shape, -10.0),
            "advantages": torch.randn(args.samples, 1, generator=g).expand(shape).contiguous(),
            "loss_mask": completions,
        }
        batch = {name: x.to(args.device) for name, x in batch.items()}
        inputs, labels = (x.contiguous().to(args.device) for x in (tokens[:, :-1], tokens[:, 1:]))
        with steps.measured():
            total, metrics = loss(model(inputs), labels, int(completions.sum()), **batch)
            apart.update(optimizer, total)
        steps.scored(metrics["bit_wise/logprob_diff/mean"])
    return steps.found


def make_model(args: argparse.Namespace) -> Any:
    """torchtitan's Qwen 3 of these sizes, with attention over whole rows; the same each time."""
    import torch
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import model_registry

    config = model_registry("debugmodel").model
    config.dim, config.vocab_size, config.layers = args.hidden, args.vocabulary, config.layers[: args.layers]
    config.norm.normalized_shape = args.hidden
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = args.vocabulary
    config.tok_embeddings.embedding_dim = config.lm_head.in_features = args.hidden
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_weights(buffer_device=None)
    return model.to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16)


def make_loss(mode: str) -> Any:
    """GRPO's loss in torchtitan's wrapper, or in ours."""
    import torchtitan.experiments

    if importlib.util.find_spec("vllm") is None:  # which the package imports for its generator, first of all
        package = types.ModuleType("torchtitan.experiments.rl")
        package.__path__ = [str(Path(torchtitan.experiments.__file__).parent / "rl")]
        sys.modules[package.__name__] = package
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.experiments.rl.losses import GRPOLoss

    from rlkernel.integrations.torchtitan import FusedLoss

    wrapper = FusedLoss if mode == "fused" else ChunkedLossWrapper
    return wrapper.Config(loss_fn=GRPOLoss.Config()).build()


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
