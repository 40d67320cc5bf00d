"""``preference_loss`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch
from torch import Tensor

from rlkernel.calls.preference_loss import PreferenceLossCall, PreferenceLossResults
from rlkernel.drivers.preference_loss import order
from rlkernel.native import kernels, taking

unsupported = taking("logprobs")


def forward(call: PreferenceLossCall) -> PreferenceLossResults:
    return loss(call, sums(call))


def sums(call: PreferenceLossCall) -> Tensor:
    logprobs, cu_seqlens, rule = call.logprobs, call.cu_seqlens, call.rule
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    part = kernels(logprobs.device)
    stats = torch.empty(rows, part.SEQUENCE_SUMS, dtype=torch.float64, device=logprobs.device)
    part.preference_sums(
        logprobs=logprobs, ref_logprobs=call.ref_logprobs, mask=call.mask, nll_mask=call.nll_mask,
        log_sum_sq_probs=call.log_sum_sq_probs, cu_seqlens=cu_seqlens, paired=rule.paired,
        ld_alpha=rule.ld_alpha, stats=stats,
    )  # fmt: skip
    return stats


def loss(call: PreferenceLossCall, stats: Tensor) -> PreferenceLossResults:
    rows, device, part = stats.shape[0], stats.device, kernels(stats.device)
    metrics = torch.empty(part.PREFERENCE_METRICS, dtype=call.logprobs.dtype, device=device)
    total, rewards, logps = metrics.new_empty(()), metrics.new_empty(rows), metrics.new_empty(rows)
    slopes = torch.empty(rows + 1, dtype=torch.float64, device=device)
    delta = None if call.running_delta is None else torch.empty_like(call.running_delta)
    part.preference_loss(
        stats=stats, labels=call.labels, kl=call.kl, order=order(call, stats), items=call.items,
        nll_items=call.nll_items, running_delta=call.running_delta, rule=call.rule, loss=total,
        metrics=metrics, slopes=slopes, rewards=rewards, logps=logps, new_delta=delta,
    )  # fmt: skip
    return PreferenceLossResults(total, metrics, rewards, logps, delta, stats, slopes)


def backward(call: PreferenceLossCall, results: PreferenceLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    mask = call.mask
    grad = torch.empty(mask.shape, dtype=grad_loss.dtype, device=mask.device)
    if results.sums.shape[0] == 0:
        return (grad.zero_(),)
    kernels(mask.device).preference_backward(
        grad_loss=grad_loss, slopes=results.slopes, stats=results.sums, mask=mask, nll_mask=call.nll_mask,
        labels=call.labels, cu_seqlens=call.cu_seqlens, ld_alpha=call.rule.ld_alpha, grad=grad,
    )  # fmt: skip
    return (grad,)
