"""``preference_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels, kernels_for
from rlkernel.types import PreferenceRule


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be fp16, bf16 or fp32, got float64")
    found = kernels_for(logprobs.device)
    if isinstance(found, str):
        reasons.append(found)
    return reasons


def sums(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    nll_mask: Tensor | None,
    log_sum_sq_probs: Tensor | None,
    cu_seqlens: Tensor | None,
    paired: bool,
    ld_alpha: float,
) -> Tensor:
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    part = kernels(logprobs.device)
    stats = torch.empty(rows, part.SEQUENCE_SUMS, dtype=torch.float64, device=logprobs.device)
    part.preference_sums(
        logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask, nll_mask=nll_mask,
        log_sum_sq_probs=log_sum_sq_probs, cu_seqlens=cu_seqlens, paired=paired, ld_alpha=ld_alpha,
        stats=stats,
    )  # fmt: skip
    return stats


def loss(
    stats: Tensor,
    labels: Tensor | None,
    kl: Tensor | None,
    order: Tensor | None,
    items: Tensor | None,
    nll_items: Tensor | None,
    running_delta: Tensor | None,
    rule: PreferenceRule,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    rows, device, part = stats.shape[0], stats.device, kernels(stats.device)
    metrics = torch.empty(part.PREFERENCE_METRICS, dtype=dtype, device=device)
    total, rewards, logps = metrics.new_empty(()), metrics.new_empty(rows), metrics.new_empty(rows)
    slopes = torch.empty(rows + 1, dtype=torch.float64, device=device)
    delta = None if running_delta is None else torch.empty_like(running_delta)
    part.preference_loss(
        stats=stats, labels=labels, kl=kl, order=order, items=items, nll_items=nll_items,
        running_delta=running_delta, rule=rule, loss=total, metrics=metrics, slopes=slopes, rewards=rewards,
        logps=logps, new_delta=delta,
    )  # fmt: skip
    return total, metrics, slopes, rewards, logps, delta


def backward(
    grad_loss: Tensor,
    slopes: Tensor,
    stats: Tensor,
    mask: Tensor,
    nll_mask: Tensor | None,
    labels: Tensor | None,
    cu_seqlens: Tensor | None,
    ld_alpha: float,
) -> Tensor:
    grad = torch.empty(mask.shape, dtype=grad_loss.dtype, device=mask.device)
    if stats.shape[0] == 0:
        return grad.zero_()
    kernels(mask.device).preference_backward(
        grad_loss=grad_loss, slopes=slopes, stats=stats, mask=mask, nll_mask=nll_mask, labels=labels,
        cu_seqlens=cu_seqlens, ld_alpha=ld_alpha, grad=grad,
    )  # fmt: skip
    return grad
