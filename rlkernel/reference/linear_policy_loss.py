"""What ``linear_policy_loss`` means: ``linear_logprob``, then ``policy_loss``, and the gradients of both."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall
from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall, LinearPolicyLossResults
from rlkernel.calls.logprob import RowGrads
from rlkernel.reference import linear_logprob, policy_loss


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "one_pass":
        return ["algorithm 'one_pass' needs the tile kernels of native or triton"]
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    return []


def forward(call: LinearPolicyLossCall) -> LinearPolicyLossResults:
    own = LinearLogprobCall.of(
        call.hidden, call.weight, call.target_ids, call.head, return_entropy=call.with_entropy,
        needs=call.needs,
    )  # fmt: skip
    stats = linear_logprob.forward(own)
    shape = call.policy.mask.shape
    entropy = None if stats.entropy is None else stats.entropy.view(shape)
    asked = call.policy._replace(logprobs=stats.logprobs.view(shape), entropy=entropy)
    loss, metrics, scale, grad, grad_entropy = policy_loss.forward(asked)
    if call.items is not None:
        loss, scale = loss / call.items.to(loss), scale / call.items.to(scale)
    grads = LinearGrads()
    if any(call.needs):
        upstream = (grad * scale).view(-1), None if grad_entropy is None else (grad_entropy * scale).view(-1)
        grads = linear_logprob.backward(own, stats, RowGrads(*upstream))
    return LinearPolicyLossResults(loss, metrics, stats.logprobs, stats.entropy, *grads)


def make_inputs(
    sequences: int,
    length: int,
    hidden_size: int,
    vocab: int,
    *,
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
        sequences * length, hidden_size, vocab, dtype=dtype, device=device, seed=seed, ignored=0.0
    )
    loss = policy_loss.make_inputs(
        sequences, length, seed=seed, drift=drift, per_token=per_token, extras=extras, bias=mean_advantage
    )
    own = []  # in chunks: without logits of all rows at once
    for h, ids in zip(head["hidden"].split(64), head["target_ids"].split(64), strict=True):
        logp = (h.double() @ head["weight"].double().T / temperature).log_softmax(-1)
        own.append(logp.gather(-1, ids[:, None])[:, 0])
    near = (
        torch.cat(own).view(sequences, length)
        if own
        else torch.zeros(sequences, length, dtype=torch.float32, device="cpu")
    )
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
