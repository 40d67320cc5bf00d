"""``policy_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels, kernels_for
from rlkernel.types import CovariancePick, PolicyRule


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be fp16, bf16 or fp32, got float64")
    found = kernels_for(logprobs.device)
    if isinstance(found, str):
        reasons.append(found)
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
    device, part = logprobs.device, kernels(logprobs.device)
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    values = torch.empty(part.POLICY_VALUES, dtype=torch.float32, device=device)
    partials = torch.empty(rows, part.POLICY_PARTIALS, dtype=torch.float64, device=device)
    grad_logprobs = torch.empty_like(logprobs)
    grad_entropy = torch.empty_like(logprobs) if entropy is not None and entropy_gradient else None
    part.policy_loss(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask,
        ref_logprobs=ref_logprobs, rollout_logprobs=rollout_logprobs, entropy=entropy, staleness=staleness,
        selected=selected, token_counts=token_counts, cu_seqlens=cu_seqlens, rule=rule,
        grad_logprobs=grad_logprobs, grad_entropy=grad_entropy, partials=partials, values=values,
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
    device, part = logprobs.device, kernels(logprobs.device)
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    selected = torch.empty_like(mask)
    partials = torch.empty(rows + 1, part.SELECTION_SUMS, dtype=torch.float64, device=device)
    counts = torch.empty(part.SELECTION_COUNTS, dtype=torch.int32, device=device)
    part.policy_select(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, cu_seqlens=cu_seqlens,
        pick=pick, selected=selected, partials=partials, counts=counts,
    )  # fmt: skip
    return selected
