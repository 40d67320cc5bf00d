"""``gae`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.gae import GaeCall, GaeResults
from rlkernel.native import kernels, kernels_for


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = [
        f"rewards and values must be at most fp32, got {str(x.dtype).removeprefix('torch.')}"
        for x in tensors[:2]
        if x.dtype == torch.float64
    ][:1]
    found = kernels_for(tensors[0].device)
    return [*reasons, found] if isinstance(found, str) else reasons


def forward(call: GaeCall) -> GaeResults:
    rewards = call.rewards
    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    returns = torch.empty_like(advantages)
    kernels(rewards.device).gae(
        rewards=rewards, values=call.values, mask=call.mask, cu_seqlens=call.cu_seqlens,
        last_values=call.last_values, gamma=call.gamma, lam=call.lam, zero_holes=call.holes == "zero",
        advantages=advantages, returns=returns,
    )  # fmt: skip
    return GaeResults(advantages, returns)
