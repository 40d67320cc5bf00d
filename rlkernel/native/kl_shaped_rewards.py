"""``kl_shaped_rewards`` over the compiled extension, on CPU, CUDA or HIP by device, in one launch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall, KlShapedRewardsResults
from rlkernel.native import kernels, kernels_for


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    wide = any(x.dtype == torch.float64 for x in tensors[:3])
    reasons = ["rewards and logprobs must be at most fp32, got float64"] if wide else []
    found = kernels_for(tensors[0].device)
    return [*reasons, found] if isinstance(found, str) else reasons


def forward(call: KlShapedRewardsCall) -> KlShapedRewardsResults:
    device = call.logprobs.device
    out = torch.empty(call.logprobs.shape, dtype=torch.float32, device=device)
    kernels(device).kl_shaped_rewards(
        rewards=call.rewards, per_sequence=call.per_sequence, logprobs=call.logprobs,
        ref_logprobs=call.ref_logprobs, mask=call.mask, cu_seqlens=call.cu_seqlens, beta=call.beta,
        kl_input=call.kl_input, kl_output=call.kl_output, estimator=call.kl_estimator, out=out,
    )  # fmt: skip
    return KlShapedRewardsResults(out)
