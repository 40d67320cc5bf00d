"""What ``linear_policy_loss`` means: ``linear_logprob``, then ``policy_loss``, and the gradients of both."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head, LinearGrads, LinearLogprobCall
from rlkernel.calls.logprob import RowGrads
from rlkernel.reference import linear_logprob, policy_loss
from rlkernel.types import LinearPolicy, LinearPolicyStats


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "one_pass":
        return ["algorithm 'one_pass' needs the tile kernels of native or triton"]
    return []


def forward(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    policy: LinearPolicy,
    algorithm: str,
    needs: tuple[bool, bool, bool],
) -> LinearPolicyStats:
    """``(loss, metrics, logprobs, entropy, d hidden, d weight, d bias)``, the gradients where needed.

    That of the weight may be wider than the weight.
    """
    of_entropy = policy.rule.entropy_coef != 0
    with_entropy = policy.return_entropy or of_entropy
    call = LinearLogprobCall.of(hidden, weight, target_ids, head, return_entropy=with_entropy, needs=needs)
    stats = linear_logprob.forward(call)
    logprobs, entropy = stats.logprobs, stats.entropy
    old, advantages, mask, offsets, reference, rollout, staleness, token_counts = policy.tensors
    assert advantages is not None and mask is not None
    values, grad, grad_entropy = policy_loss.forward(
        logprobs.view(mask.shape), old, advantages, mask, offsets, reference, rollout,
        None if entropy is None else entropy.view(mask.shape), policy.rule, of_entropy, staleness, None,
        token_counts,
    )  # fmt: skip
    loss, scale, metrics = values[0], values[1], values[2:].clone()
    if policy.items is not None:
        loss, scale = loss / policy.items.to(loss), scale / policy.items.to(scale)
    grads = LinearGrads()
    if any(needs):
        upstream = (grad * scale).view(-1), None if grad_entropy is None else (grad_entropy * scale).view(-1)
        grads = linear_logprob.backward(call, stats, RowGrads(*upstream))
    return loss.clone(), metrics, logprobs, entropy, *grads


def make_inputs(
    sequences: int,
    length: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    drift: float = 0.2,
    extras: bool = False,
    full: bool = False,
    temperature: float = 1.0,
    per_token: bool = True,
    mean_advantage: float = 0.0,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.linear_policy_loss``: the head of ``linear_logprob.make_inputs``, old
    logprobs ``drift`` away from its own at ``temperature``; ``full`` sets the whole mask."""
    head = linear_logprob.make_inputs(
        sequences * length, hidden_size, vocab, dtype, device, seed, ignored=0.0
    )
    loss = policy_loss.make_inputs(
        sequences, length, seed=seed, drift=drift, per_token=per_token, extras=extras, bias=mean_advantage
    )
    own = []  # in chunks: without logits of all rows at once
    for h, ids in zip(head["hidden"].split(64), head["target_ids"].split(64), strict=True):
        logp = (h.double() @ head["weight"].double().T / temperature).log_softmax(-1)
        own.append(logp.gather(-1, ids[:, None])[:, 0])
    near = torch.cat(own).view(sequences, length) if own else torch.zeros(sequences, length)
    old = loss.pop("old_logprobs")
    moved = {"old_logprobs": near + (loss.pop("logprobs") - old).to(near)}
    for name in ("ref_logprobs", "rollout_logprobs"):
        if name in loss:
            moved[name] = near + (loss.pop(name) - old).to(near)
    loss.pop("entropy", None)
    mask = loss.pop("mask").to(device)
    loss |= {name: x.float() for name, x in moved.items()}
    return {
        "hidden": head["hidden"].view(sequences, length, hidden_size),
        "weight": head["weight"],
        "target_ids": head["target_ids"].view(sequences, length),
        **{name: x.to(device) for name, x in loss.items()},
        "mask": torch.ones_like(mask) if full else mask,
    }
