"""Batches, losses and trainers of the real torchtitan."""

import asyncio
import copy
import tempfile
from unittest import mock

import on_a_cpu  # noqa: F401  # before the others, in a process of its own too
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.losses import DAPOLoss, GRPOLoss
from torchtitan.experiments.rl.types import TrainingMicrobatch
from torchtitan.models.common.linear import Linear
from torchtitan.models.qwen3 import model_registry

from rlkernel.integrations.torchtitan import FusedLoss

ROWS, LENGTH, HIDDEN, VOCAB = 2, 16, 32, 97
INNER = {
    "grpo": GRPOLoss.Config(clip_eps=0.2),
    "dapo": DAPOLoss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28),
    "sft": CrossEntropyLoss.Config(),
}


def fused(inner):
    return FusedLoss.Config(loss_fn=inner)


def chunked(inner, chunks=4):
    return ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=inner)


def batch(inner="grpo", seed=0, rows=ROWS, length=LENGTH, vocab=VOCAB):
    """Labels, and what the loss takes besides."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, (rows, length), generator=g)
    if inner == "sft":
        labels[torch.rand(rows, length, generator=g) < 0.3] = -100
        return labels, {"positions": torch.arange(length).repeat(rows, 1)}
    generator_logprobs = -4 - torch.rand(rows, length, generator=g)
    generator_logprobs[0, 3] = -torch.inf  # which vLLM says of some tokens
    return labels, {
        "generator_logprobs": generator_logprobs,
        "advantages": torch.randn(rows, length, generator=g),
        "loss_mask": torch.rand(rows, length, generator=g) > 0.3,
    }


def hidden_states(seed=0, length=LENGTH):
    return torch.randn(ROWS, length, HIDDEN, generator=torch.Generator().manual_seed(seed + 100))


def head(dtype=torch.float32, config=None, seed=0):
    """An lm_head, as a model has it."""
    config = config or Linear.Config(in_features=HIDDEN, out_features=VOCAB)
    module = config.build()
    g = torch.Generator().manual_seed(seed + 200)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    return module.to(dtype)


def outcome(loss, module, hidden, labels, inputs, *, whole=False, factor=1.0, valid=19):
    """Loss, metrics, and the gradients of the hidden states and of the lm_head."""
    module.zero_grad()
    hidden = hidden.detach().clone().requires_grad_()
    if whole:
        total, metrics = loss(module(hidden), labels, valid, **inputs)
    else:
        loss.set_lm_head(module)
        total, metrics = loss(hidden, labels, valid, **inputs)
    (total * factor).backward()
    grads = {"hidden": hidden.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return total.detach(), metrics, {name: grad.clone() for name, grad in grads.items()}


def exact(config, module, hidden, labels, inputs):
    """The same of whole logits, in fp64."""
    wide = copy.deepcopy(module).double()
    wide.compute_dtype = torch.float64  # of a CastLinear
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return outcome(config.build(), wide, hidden.double(), labels, inputs, whole=True)


def trainer(
    loss, *, dtype="float32", tied=True, ranks=1, tensor_parallel=1, backend="spmd_types", **training
):
    """torchtitan's trainer of RL on a model of two layers."""
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    spec.model.enable_weight_tying = tied
    if not tied:
        spec.model.tok_embeddings.param_init = {"weight": torch.nn.init.normal_}
    for layer in spec.model.layers:
        layer.feed_forward = small(layer.feed_forward)
    config = PolicyTrainer.Config(
        loss=loss,
        optimizer=default_adamw(lr=1e-2, eps=1e-3),  # a small gradient is rounding, and takes a small step
        training=TrainingConfig(seq_len=LENGTH, mixed_precision_param=dtype, **training),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=ranks // tensor_parallel,
            tensor_parallel_degree=tensor_parallel,
            spmd_backend=backend,
        ),
    )
    torch.manual_seed(0)
    actor = PolicyTrainer(
        config, model_spec=spec, compile_config=CompileConfig(enable=False), output_dir=tempfile.mkdtemp()
    )
    for module in actor.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # which is all that Gloo can do
    return actor


def small(feed_forward, size=64):
    for layer in (feed_forward.w1, feed_forward.w3):
        layer.out_features = size
    feed_forward.w2.in_features = size
    return feed_forward


def trained(loss, *, steps=2, accumulate=2, ranks=1, **options):
    """What a few steps told, and the weights after them."""
    actor = trainer(loss, ranks=ranks, **options)
    vocab, told = actor.model.config.vocab_size, []
    for step in range(steps):
        microbatches = [
            [microbatch(1000 * step + 10 * i + rank, vocab) for rank in range(actor.dp_size)]
            for i in range(accumulate)
        ]
        for grid in microbatches:
            told.append(asyncio.run(actor.forward_backward(grid, 40)))
        told.append(asyncio.run(actor.optim_step()).metrics)
    state = {name: whole(x) for name, x in actor.model.state_dict().items()}
    return told, state


def microbatch(seed, vocab):
    labels, inputs = batch("grpo", seed, vocab=vocab)
    inputs["generator_logprobs"] -= 4
    tokens = labels.roll(1, 1)
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    positions[:, LENGTH // 2 :] -= LENGTH // 2  # two samples a row
    return TrainingMicrobatch(token_ids=tokens, labels=labels, positions=positions, **inputs)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x
