"""What ``linear_logprob`` means, in plain PyTorch, with the logits in memory."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.reference import logprob

LinearStats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    return []


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    return_entropy: bool,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    algorithm: str,
    need_direction: bool,
) -> LinearStats:
    """``(logprobs, entropy, lse, row_max, log_sum, direction)``.

    ``direction`` is None, or d logprobs / d hidden, [N, H] in hidden's dtype, where ``need_direction`` asks
    for it.
    """
    logits, _ = _logits(hidden, weight, bias, logit_scale, softcap, logits_dtype, compute_dtype)
    stats = logprob.forward(logits, target_ids, temperature, ignore_index, return_entropy)
    direction = None
    if need_direction:
        direction, _, _ = backward(
            torch.ones_like(stats[0]), None, None, hidden, weight, bias, target_ids, temperature, logit_scale,
            softcap,
            ignore_index, logits_dtype, compute_dtype, *stats[1:2], *stats[3:], None, (True, False, False),
        )  # fmt: skip
    return *stats, direction


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    direction: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Grads:
    """Gradients of hidden, weight and bias, each in its dtype and only where ``needs`` says so."""
    logits, u = _logits(hidden, weight, bias, logit_scale, softcap, logits_dtype, compute_dtype)
    grad = logprob.backward(
        grad_logprobs, grad_entropy, grad_lse, logits, target_ids, temperature, ignore_index, entropy,
        row_max, log_sum, False
    )  # fmt: skip
    if softcap is not None:
        grad = torch.where(grad == 0, 0, grad * (1 - torch.tanh(u / softcap) ** 2))
    grad = grad * logit_scale
    wide = grad.dtype
    h, w = hidden.to(compute_dtype).to(wide), weight.to(compute_dtype).to(wide)
    return (
        (grad @ w).to(hidden.dtype) if needs[0] else None,
        (grad.T @ h).to(weight.dtype) if needs[1] else None,
        grad.sum(0).to(bias.dtype) if needs[2] and bias is not None else None,
    )


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The logits and what they are before the softcap."""
    wide = torch.promote_types(compute_dtype, torch.float32)
    u = hidden.to(compute_dtype).to(wide) @ weight.to(compute_dtype).to(wide).T
    if wide == torch.float32:
        u = u.to(logits_dtype).to(wide)
    if bias is not None:
        u = u + bias.to(wide)
    u = u * logit_scale
    return (softcap * torch.tanh(u / softcap) if softcap is not None else u), u


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
