"""What ``linear_logprob`` means, in plain PyTorch, with the logits in memory."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.reference import logprob
from rlkernel.types import Head, LinearGrads, LinearStats

Statistics = tuple[Tensor | None, Tensor | None, Tensor | None]


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    return []


def forward(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    algorithm: str,
    need_direction: bool,
    keep: bool,
) -> LinearStats:
    """``(logprobs, entropy, lse, row_max, log_sum, direction)``.

    ``direction`` is d logprobs / d hidden, [N, H] in hidden's dtype, or None where nobody asks for it.
    """
    logits, _ = _logits(hidden, weight, head)
    call = LogprobCall(logits, target_ids, head.temperature, head.ignore_index, return_entropy)
    logprobs, entropy, lse, row_max, log_sum, _ = logprob.forward(call)
    direction = None
    if need_direction:
        ones, hidden_only = RowGrads(torch.ones_like(logprobs)), (True, False, False)
        direction = backward(
            ones, hidden, weight, target_ids, head, entropy, row_max, log_sum, None, hidden_only
        )[0]
    return logprobs, entropy, lse, row_max, log_sum, direction


def statistics(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    need_direction: bool,
    keep: bool,
    names: tuple[str, ...],
) -> tuple[LinearStats, Statistics]:
    """What ``forward`` returns, and of ``names``: the mean of ``logits / T``, whether no logit is larger than
    the target's, and ``log(sum of p**2)``; 0 and False on ignored rows."""
    stats = forward(hidden, weight, target_ids, head, return_entropy, "auto", need_direction, keep)
    logits, _ = _logits(hidden, weight, head)
    t = head.temperature[:, None] if isinstance(head.temperature, Tensor) else head.temperature
    z, kept = logits / t, target_ids != head.ignore_index
    mean = torch.where(kept, z.mean(-1), 0)
    inside = torch.where(kept, target_ids, 0)[:, None]
    top = kept & (logits.gather(-1, inside)[:, 0] >= logits.amax(-1))
    squares = torch.where(kept, (2 * z.log_softmax(-1)).logsumexp(-1), 0)
    every = {"mean_logits": mean, "is_top1": top, "log_sum_sq_probs": squares}
    return stats, tuple(x if name in names else None for name, x in every.items())  # type: ignore[return-value]


def backward(
    grads: RowGrads,
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    direction: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> LinearGrads:
    """Gradients of hidden, weight and bias, each in its dtype and only where ``needs`` says so."""
    logits, u = _logits(hidden, weight, head)
    call = LogprobCall(logits, target_ids, head.temperature, head.ignore_index, entropy is not None)
    none = torch.empty(0)  # backward reads no logprobs and no lse
    results = LogprobResults(none, entropy, none, row_max, log_sum)
    (grad,) = logprob.backward(call, results, RowGrads(*grads))
    if head.softcap is not None:
        grad = torch.where(grad == 0, 0, grad * (1 - torch.tanh(u / head.softcap) ** 2))
    grad = grad * head.logit_scale
    h, w = (x.to(head.compute_dtype).to(grad.dtype) for x in (hidden, weight))
    return (
        (grad @ w).to(hidden.dtype) if needs[0] else None,
        (grad.T @ h).to(weight.dtype) if needs[1] else None,
        grad.sum(0).to(head.bias.dtype) if needs[2] and head.bias is not None else None,
    )


def _logits(hidden: Tensor, weight: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """The logits and what they are before the softcap."""
    wide = torch.promote_types(head.compute_dtype, torch.float32)
    h, w = (x.to(head.compute_dtype).to(wide) for x in (hidden, weight))
    u = h @ w.T
    if wide == torch.float32:
        u = u.to(head.logits_dtype).to(wide)
    if head.bias is not None:
        u = u + head.bias.to(wide)
    u = u * head.logit_scale
    return (head.softcap * torch.tanh(u / head.softcap) if head.softcap is not None else u), u


def make_inputs(
    tokens: int,
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float = 3.0,
    ignored: float = 0.1,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.linear_logprob``: logits of standard deviation ``scale``, a share of
    ``ignored`` rows, and targets drawn from the distribution itself as a rollout draws them."""
    g = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=g, device=device).to(dtype)
    weight = torch.empty(vocab, hidden_size, device=device, dtype=dtype)
    for rows in weight.split(8192):  # no fp32 copy of a large head
        rows.copy_(torch.randn(rows.shape, generator=g, device=device) * (scale / hidden_size**0.5))
    target_ids = torch.empty(tokens, dtype=torch.int64, device=device)
    for h, ids in zip(hidden.split(64), target_ids.split(64), strict=True):
        logits = (h @ weight.T).float()
        ids.copy_((logits - torch.empty_like(logits).exponential_(generator=g).log_()).argmax(-1))
    drop = torch.rand(tokens, generator=g, device=device) < ignored
    return {"hidden": hidden, "weight": weight, "target_ids": torch.where(drop, -100, target_ids)}
