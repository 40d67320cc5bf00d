"""AReaL's FSDP engine as it makes itself on a CPU, its batches, and what it gives for them."""

import contextlib
import os
from unittest import mock

import tiny
import torch
from areal_cases import engine, load, own_logging

cli_args, alloc_mode, io_struct = map(
    load, ("areal.api.cli_args", "areal.api.alloc_mode", "areal.api.io_struct")
)
VOCAB = 160
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def configured(path, kind, **options):
    given = {
        "attn_impl": "sdpa", "dtype": "float32", "temperature": 0.7,
        "optimizer": cli_args.OptimizerConfig(lr=1e-3), "gradient_checkpointing": False,
        "mb_spec": cli_args.MicroBatchSpec(max_tokens_per_mb=40),
    }  # fmt: skip
    return getattr(cli_args, kind)(experiment_name="e", trial_name="t", path=str(path), **given | options)


def make(path, kind="FSDPPPOActor", config="PPOActorConfig", data=1, sequence=1, tensor=1, **options):
    """An engine of the model in ``path``; the processes of its ranks have met."""
    layout = alloc_mode.ParallelStrategy(
        data_parallel_size=data, context_parallel_size=sequence, tensor_parallel_size=tensor
    )
    # what AReaL and its starter set, other frameworks would take for their own
    with own_logging(), mock.patch.dict(os.environ, LOCAL_RANK=os.environ.get("RANK", "0")):
        made = getattr(engine, kind)(configured(path, config, **options))
        made.create_process_group(layout)
        made.initialize(None, io_struct.FinetuneSpec(1, 8, 8))
    return made


def save(path, **options):
    tiny.save(path, vocab=VOCAB, hidden=32, **options)
    return path


def batch(seed=0, rows=5, tokens=13):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, tokens + 1, (rows,), generator=g)
    lengths[0] = tokens
    there = torch.arange(tokens) < lengths[:, None]
    return {
        "input_ids": torch.randint(3, VOCAB, (rows, tokens), generator=g) * there,
        "attention_mask": there,
        "loss_mask": there & (torch.arange(tokens) > 1),
    }


def weight(given):
    return given["loss_mask"].count_nonzero()


def step(made, given, weights=weight):
    """What a loss is given in every micro-batch, and the gradients that it leaves; without the optimizer."""
    seen, grads = [], {}

    def loss(logprobs, entropy, micro, vocab_min_logits, vocab_max_logits):
        assert not vocab_min_logits.requires_grad and not vocab_max_logits.requires_grad
        seen.append([x.detach().clone() for x in (logprobs, entropy, vocab_min_logits, vocab_max_logits)])
        kept = micro["loss_mask"]
        scale = torch.linspace(-1, 1, len(logprobs))
        return (logprobs * kept * scale).sum() + 0.3 * (entropy * scale).sum()

    def grab():
        for name, p in made.model.named_parameters():
            if p.grad is not None:
                grads[name] = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        return {}

    made.train()
    made.model.zero_grad()  # which the optimizer may not know
    with replaced(made, "optimizer_step", grab):
        made.train_batch(dict(given), loss, weights)
    evaluated = made.eval_batch(dict(given), loss, weights)
    return seen, grads, evaluated


@contextlib.contextmanager
def replaced(owner, name, new):
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name)


def scored(made, given):
    made.eval()
    return made.forward(dict(given), aggregate_fn=lambda parts: torch.cat(parts, -1))


def everything(made, given, **options):
    """As lists of tensors: the logprobs of a forward pass, what losses see, and gradients by name."""
    seen, grads, evaluated = step(made, given, **options)
    return [scored(made, given), evaluated, *(x for micro in seen for x in micro)], grads
