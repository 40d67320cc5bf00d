"""``policy_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch

from rlkernel.calls import policy_loss as calls
from rlkernel.native import kernels, taking

unsupported = taking("logprobs")


def forward(call: calls.PolicyLossCall) -> calls.PolicyLossResults:
    logprobs, cu_seqlens = call.logprobs, call.cu_seqlens
    device, part = logprobs.device, kernels(logprobs.device)
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    values = torch.empty(part.POLICY_VALUES, dtype=torch.float32, device=device)
    partials = torch.empty(rows, part.POLICY_PARTIALS, dtype=torch.float64, device=device)
    grad_logprobs = torch.empty_like(logprobs)
    grad_entropy = torch.empty_like(logprobs) if call.entropy_gradient else None
    part.policy_loss(
        logprobs=logprobs, old_logprobs=call.old_logprobs, advantages=call.advantages, mask=call.mask,
        ref_logprobs=call.ref_logprobs, rollout_logprobs=call.rollout_logprobs, entropy=call.entropy,
        staleness=call.staleness, selected=call.selected, token_counts=call.token_counts,
        cu_seqlens=cu_seqlens, rule=call.rule, grad_logprobs=grad_logprobs, grad_entropy=grad_entropy,
        partials=partials, values=values,
    )  # fmt: skip
    # ``data``: tensors of their own, that a caller may modify in place, and no kernel to copy them
    return calls.PolicyLossResults(values[0].data, values[2:-1].data, values[1], grad_logprobs, grad_entropy)


def select(call: calls.PolicySelectCall) -> calls.PolicySelectResults:
    logprobs, cu_seqlens = call.logprobs, call.cu_seqlens
    device, part = logprobs.device, kernels(logprobs.device)
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    selected = torch.empty_like(call.mask)
    partials = torch.empty(rows + 1, part.SELECTION_SUMS, dtype=torch.float64, device=device)
    counts = torch.empty(part.SELECTION_COUNTS, dtype=torch.int32, device=device)
    part.policy_select(**call._asdict(), selected=selected, partials=partials, counts=counts)
    return calls.PolicySelectResults(selected)
