"""``preference_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, launch
from rlkernel.types import PAIR_METRICS, SEQUENCE_SUMS, PreferenceRule


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be fp16, bf16 or fp32, got float64")
    kernels = kernels_for(logprobs.device)
    if isinstance(kernels, str):
        reasons.append(kernels)
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
    stats = torch.empty(rows, len(SEQUENCE_SUMS), dtype=torch.float64, device=logprobs.device)
    per_token = ref_logprobs is not None and ref_logprobs.shape == logprobs.shape
    launch(
        "preference_sums", logprobs.device, _address(logprobs), _address(ref_logprobs), per_token,
        *map(_address, (mask, nll_mask, log_sum_sq_probs, cu_seqlens)), rows, logprobs.shape[-1], paired,
        ld_alpha,
        _address(stats),
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
    rows, device = stats.shape[0], stats.device
    metrics = torch.empty(len(PAIR_METRICS), dtype=dtype, device=device)
    total, rewards, logps = metrics.new_empty(()), metrics.new_empty(rows), metrics.new_empty(rows)
    slopes = torch.empty(rows + 1, dtype=torch.float64, device=device)
    delta = None if running_delta is None else torch.empty_like(running_delta)
    launch(
        "preference_loss", device, _address(stats), rows, _address(labels), _address(kl),
        kl is not None and kl.numel() != 1,
        *map(_address, (order, items, nll_items, running_delta, total, metrics, slopes, rewards, logps,
        delta)),
        [int(rule.paired), int(rule.per_token), rule.divergence, int(rule.weighting), *rule.terms],
        rule[7:], rule.weights, rule.smoothing,
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
    launch(
        "preference_backward", mask.device,
        *map(_address, (grad_loss, slopes, stats, mask, nll_mask, labels, cu_seqlens)), stats.shape[0],
        mask.shape[-1], ld_alpha, _address(grad),
    )  # fmt: skip
    return grad


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
