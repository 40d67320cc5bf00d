"""``policy_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, launch
from rlkernel.types import POLICY_CHOICES, POLICY_METRICS, CovariancePick, PolicyRule

_PARTIALS = len(POLICY_METRICS) + 1  # doubles of a sequence: kPartials
_SELECTION_SUMS, _COUNTS = 3, 3 * 2048  # kSelectionSums, kLevels * kBins


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be fp16, bf16 or fp32, got float64")
    kernels = kernels_for(logprobs.device)
    if isinstance(kernels, str):
        reasons.append(kernels)
    return reasons


def forward(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    entropy: Tensor | None,
    rule: PolicyRule,
    entropy_gradient: bool,
    staleness: Tensor | None = None,
    selected: Tensor | None = None,
    token_counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    device = logprobs.device
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    length = logprobs.shape[-1]
    values = torch.empty(2 + len(POLICY_METRICS) + 1, dtype=torch.float32, device=device)
    partials = torch.empty(rows, _PARTIALS, dtype=torch.float64, device=device)
    grad_logprobs = torch.empty_like(logprobs)
    grad_entropy = torch.empty_like(logprobs) if entropy is not None and entropy_gradient else None
    tensors = (
        logprobs,
        old_logprobs,
        advantages,
        mask,
        ref_logprobs,
        rollout_logprobs,
        entropy,
        staleness,
        selected,
        token_counts,
    )
    launch(
        "policy_loss", device, *map(_address, tensors), _address(cu_seqlens), rows, length,
        advantages.shape == logprobs.shape, staleness is not None and staleness.shape == logprobs.shape,
        *map(_address, (grad_logprobs, grad_entropy, partials, values)),
        rule[:POLICY_CHOICES], rule[POLICY_CHOICES:],
    )  # fmt: skip
    return values[:-1], grad_logprobs, grad_entropy


def select(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    pick: CovariancePick,
) -> Tensor:
    device = logprobs.device
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    selected = torch.empty_like(mask)
    partials = torch.empty(rows + 1, _SELECTION_SUMS, dtype=torch.float64, device=device)
    counts = torch.empty(_COUNTS, dtype=torch.int32, device=device)
    launch(
        "policy_select", device, *map(_address, (logprobs, old_logprobs, advantages, mask, cu_seqlens)), rows,
        logprobs.shape[-1], advantages.shape == logprobs.shape, *pick,
        *map(_address, (selected, partials, counts)),
    )  # fmt: skip
    return selected


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
