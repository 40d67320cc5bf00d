"""``gae`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch

from rlkernel.calls.gae import GaeCall, GaeResults
from rlkernel.native import at_most_fp32, kernels

unsupported = at_most_fp32("rewards and values", 2)


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
