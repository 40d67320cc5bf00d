"""``gae`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.gae import GaeCall, GaeResults
from rlkernel.native import kernels, refusals


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return refusals("rewards and values", *tensors[:2])


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
