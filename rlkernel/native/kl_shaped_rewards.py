"""``kl_shaped_rewards`` over the compiled extension, on CPU, CUDA or HIP by device, in one launch."""

import torch

from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall, KlShapedRewardsResults
from rlkernel.native import at_most_fp32, kernels

unsupported = at_most_fp32("rewards and logprobs", 3)


def forward(call: KlShapedRewardsCall) -> KlShapedRewardsResults:
    device = call.logprobs.device
    out = torch.empty(call.logprobs.shape, dtype=torch.float32, device=device)
    kernels(device).kl_shaped_rewards(
        rewards=call.rewards, per_sequence=call.per_sequence, logprobs=call.logprobs,
        ref_logprobs=call.ref_logprobs, mask=call.mask, cu_seqlens=call.cu_seqlens, beta=call.beta,
        kl_input=call.kl_input, kl_output=call.kl_output, estimator=call.kl_estimator, out=out,
    )  # fmt: skip
    return KlShapedRewardsResults(out)
