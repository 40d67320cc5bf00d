"""A GRPO step of a model of Megatron-Core: log-probabilities, clipped loss and update, stock and patched.

    python examples/megatron_step.py                               # a minute
    python examples/megatron_step.py --length 512 --vocabulary 65536
    python examples/megatron_step.py --device cuda                 # on a GPU
    python examples/megatron_step.py --json result.json            # every figure, step by step

The model is a random GPT on one rank, made on the spot; the sequences are random and the same in both runs,
each of which has a process of its own.  A model of Megatron that is given labels returns the loss of each
token, which is its negative log-probability: with ``patch_megatron()`` no logits are made for it.  A step is
the old log-probabilities, those of the policy with their graph, the loss, the backward pass and the
optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from typing import Any

import apart

NEEDED = ("megatron.core",)
MODES = ("stock", "patched")


def begin(device: str) -> None:
    """Megatron's groups of ranks, of this one alone."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    store = f"file://{tempfile.mkdtemp()}/store"
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if device == "cpu":  # it asks for a GPU's buffers, and its random numbers for dropout
        torch.cuda.current_device = lambda: torch.device("cpu")
        random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    else:
        random.model_parallel_cuda_manual_seed(0)


def make_gpt(args: argparse.Namespace) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.hidden // 64,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        cross_entropy_loss_fusion=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        bf16=args.device != "cpu",
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=args.vocabulary,
        max_sequence_length=args.length, share_embeddings_and_output_weights=True,
    )  # fmt: skip
    return model.to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16)


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import torch

    import rlkernel

    torch.set_num_threads(args.threads)
    torch.compiler.set_stance("force_eager" if args.device == "cpu" else "default")
    begin(args.device)
    if mode == "patched":
        rlkernel.patch_megatron()
    model = make_gpt(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    positions = torch.arange(args.length, device=args.device).expand(args.samples, -1)
    causal = torch.ones(args.length, args.length, dtype=torch.bool, device=args.device).triu(1)[None, None]
    g = torch.Generator().manual_seed(1)
    steps = apart.Steps(args.device)
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g).to(args.device)
        advantages = torch.randn(args.samples, 1, generator=g).to(args.device)
        labels = ids.roll(-1, 1)
        with steps.measured():
            with torch.no_grad():
                old = -model(ids, positions, causal, labels=labels)
            logprobs = -model(ids, positions, causal, labels=labels)
            ratio = (logprobs - old).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[:, :-1].mean()
            apart.update(optimizer, loss)
        steps.scored(logprobs)
    return steps.found


if __name__ == "__main__":
    apart.steps_of(train, __doc__, MODES, NEEDED)
