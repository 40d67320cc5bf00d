"""``policy_loss`` over Triton: a program for each sequence, then one that joins their sums."""

import math
from collections import namedtuple

import torch

from rlkernel.calls import policy_loss as calls
from rlkernel.triton_ops import policy_loss_kernels as kernels
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops.policy_loss_selection import selection
from rlkernel.triton_ops.policy_loss_terms import Aggregate

# what is compiled in, and what is not; Triton takes a named tuple as one argument
_FIELDS, _FIRST = calls.PolicyRule._fields, calls.POLICY_CHOICES
_Choices = namedtuple("_Choices", (*_FIELDS[:_FIRST], "rejects_k2", "rejects_k3", "tv", "off_policy"))  # type: ignore[misc]
_Numbers = namedtuple("_Numbers", _FIELDS[_FIRST:])  # type: ignore[misc]
_BLOCK = 1024  # fixed: the order of a sequence's sums must not follow from the padding


unsupported = taking("logprobs")


def forward(call: calls.PolicyLossCall) -> calls.PolicyLossResults:
    logprobs, old_logprobs, advantages = call.logprobs, call.old_logprobs, call.advantages
    mask, cu_seqlens, rollout_logprobs = call.mask.view(torch.uint8), call.cu_seqlens, call.rollout_logprobs
    staleness, rule = call.staleness, call.rule
    device = logprobs.device
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    length = logprobs.shape[-1]
    values = torch.empty(len(kernels.Value), dtype=torch.float32, device=device)
    partials = torch.empty(rows, kernels.COLUMNS.value, dtype=torch.float64, device=device)
    grad_logprobs = torch.empty_like(logprobs)
    grad_entropy = torch.empty_like(logprobs) if call.entropy_gradient else None
    picked = None if call.selected is None else call.selected.view(torch.uint8)
    numbers = _Numbers(*rule[_FIRST:])
    bounds = min(rule.sum_k2_high, rule.mean_k2_high), min(rule.sum_k3_high, rule.mean_k3_high)
    bounded = [bound < math.inf for bound in (*bounds, rule.tv_high, rule.off_policy_high)]
    choices = _Choices._make([*map(int, rule[:_FIRST]), *bounded])
    stale_per_token = staleness is not None and staleness.shape == logprobs.shape
    with torch.cuda.device_of(logprobs):
        if rows and rule.normalize:
            kernels.weights_kernel[(rows,)](
                logprobs, old_logprobs, mask, cu_seqlens, rollout_logprobs, staleness, partials, length,
                numbers, C=choices, STALE_PER_TOKEN=stale_per_token, BLOCK=_BLOCK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
            kernels.mean_weight_kernel[(1,)](
                partials, rows, values, BLOCK=256, num_warps=4, enable_fp_fusion=False
            )
        if rows:
            kernels.sequence_kernel[(rows,)](
                logprobs, old_logprobs, advantages, mask, cu_seqlens, call.ref_logprobs, rollout_logprobs,
                call.entropy, staleness, picked, call.token_counts, grad_logprobs, grad_entropy, partials,
                values, length, numbers, C=choices, PER_TOKEN=advantages.shape == logprobs.shape,
                STALE_PER_TOKEN=stale_per_token, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        kernels.values_kernel[(1,)](
            partials, rows, values, rule.denominator, rule.factor,
            BY_TOKEN=rule.aggregation == Aggregate.tokens, BLOCK=256, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    # ``data``: tensors of their own, that a caller may modify in place, and no kernel to copy them
    return calls.PolicyLossResults(values[0].data, values[2:-1].data, values[1], grad_logprobs, grad_entropy)


def select(call: calls.PolicySelectCall) -> calls.PolicySelectResults:
    return calls.PolicySelectResults(selection(call))
