"""Every differentiable op as a function of the tensors that it passes a gradient to, small."""

import functools

import torch

import rlkernel


def _rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


IDS = torch.tensor([[1, 4, 0], [2, 2, 3]])
FLAT = IDS.flatten()
MASK = torch.ones(2, 3, dtype=torch.bool)
ADVANTAGES = _rows(2)
TEACHER = _rows(6, 7), _rows(5, 7)
SUPPORT = {
    "support_ids": torch.tensor([1, 4, 0, 2]),
    "support_offsets": torch.tensor([0, 2, 2, 3, 4, 4, 4]),
}


@functools.cache
def _batch():
    return rlkernel.PrefixBatch.pack([[1, 2, 3]], [[[4, 5], [6, 7]]])


def _head(hidden, weight, bias, **options):
    return rlkernel.linear_logprob(hidden, weight, FLAT, bias=bias, **options).logprobs.sum()


def _linear_divergence(hidden, weight, bias):
    return rlkernel.linear_divergence(hidden, weight, *TEACHER, bias=bias).divergence.sum()


def _linear_policy(hidden, weight, bias):
    return rlkernel.linear_policy_loss(hidden, weight, IDS, None, ADVANTAGES, MASK, bias=bias).loss


def _policy(logprobs, entropy):
    options = {"entropy": entropy, "entropy_coef": 0.1}
    return rlkernel.policy_loss(logprobs, logprobs.detach() - 0.1, ADVANTAGES, MASK, **options).loss


def _prefix_attention(q, k, v, sinks):
    return rlkernel.prefix_shared_attention(q, k, v, _batch(), sinks=sinks).square().sum()


def _attention(q, k, v, sinks):
    return rlkernel.attention(q, k, v, batch=_batch(), sinks=sinks).square().sum()


HEAD = {"hidden": (6, 4), "weight": (5, 4), "bias": (5,)}
QKV = {"q": (6, 4, 8), "k": (6, 2, 8), "v": (6, 2, 8), "sinks": (4,)}
# name -> a loss, and the shapes of its arguments
OPS = {
    "logprob": (lambda logits: rlkernel.logprob(logits, IDS).logprobs.sum(), {"logits": (2, 3, 5)}),
    "logprob_support": (
        lambda logits: rlkernel.logprob(logits, IDS, **SUPPORT).lse.sum(),
        {"logits": (2, 3, 5)},
    ),
    "linear_logprob": (_head, HEAD),
    "linear_logprob_support": (lambda *head: _head(*head, **SUPPORT), HEAD),
    "linear_logprob_statistics": (
        lambda hidden, weight: rlkernel.linear_logprob_statistics(hidden, weight, FLAT).logprobs.sum(),
        {"hidden": (6, 4), "weight": (5, 4)},
    ),
    "linear_divergence": (_linear_divergence, HEAD),
    "matmul": (
        lambda a, b, bias: rlkernel.matmul(a, b, bias).square().sum(),
        {"a": (6, 4), "b": (4, 5), "bias": (5,)},
    ),
    "policy_loss": (_policy, {"logprobs": (2, 3), "entropy": (2, 3)}),
    "linear_policy_loss": (_linear_policy, HEAD | {"hidden": (2, 3, 4)}),
    "value_loss": (
        lambda values: rlkernel.value_loss(values, torch.zeros(2, 3), MASK).loss,
        {"values": (2, 3)},
    ),
    "preference_loss": (
        lambda logprobs: rlkernel.preference_loss(logprobs, torch.zeros(2, 3), MASK).loss,
        {"logprobs": (2, 3)},
    ),
    "prefix_shared_attention": (_prefix_attention, QKV),
    "attention": (_attention, QKV),
    "layer_norm": (
        lambda *row: rlkernel.layer_norm(*row).square().sum(),
        {"x": (2, 3, 5), "weight": (5,), "bias": (5,)},
    ),
    "rotary": (
        lambda q, k: sum(x.square().sum() for x in rlkernel.rotary(q, k, *torch.ones(2, 3, 4))),
        {"q": (3, 2, 4), "k": (3, 1, 4)},
    ),
    "swiglu": (lambda *row: rlkernel.swiglu(*row).square().sum(), {"gate": (2, 3, 5), "up": (2, 3, 5)}),
    "rms_norm": (lambda *row: rlkernel.rms_norm(*row).square().sum(), {"x": (2, 3, 5), "weight": (5,)}),
    "rms_norm_of_sum": (
        lambda x, residual: rlkernel.rms_norm(x, residual=residual).normed.square().sum(),
        {"x": (2, 5), "residual": (2, 5)},
    ),
}


def name_of(op):
    """Of the public module that it is in."""
    for suffix in ("_statistics", "_support", "_of_sum"):
        op = op.removesuffix(suffix)
    return op


def leaves(op, only=None):
    """Arguments of the op; those that are not named in ``only`` require no gradient."""
    return [_rows(*shape).requires_grad_(only is None or name in only) for name, shape in OPS[op][1].items()]
