"""``kl_shaped_rewards`` over the compiled extension, on CPU, CUDA or HIP by device, in one launch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall, KlShapedRewardsResults
from rlkernel.native import kernels, refusals


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return refusals("rewards and logprobs", *tensors[:3])


def forward(call: KlShapedRewardsCall) -> KlShapedRewardsResults:
    device = call.logprobs.device
    out = torch.empty(call.logprobs.shape, dtype=torch.float32, device=device)
    kernels(device).kl_shaped_rewards(
        rewards=call.rewards, per_sequence=call.per_sequence, logprobs=call.logprobs,
        ref_logprobs=call.ref_logprobs, mask=call.mask, cu_seqlens=call.cu_seqlens, beta=call.beta,
        kl_input=call.kl_input, kl_output=call.kl_output, estimator=call.kl_estimator, out=out,
    )  # fmt: skip
    return KlShapedRewardsResults(out)
