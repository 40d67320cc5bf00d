"""``preference_loss`` over Triton: a program for each sequence sums it, one makes the loss, one each writes
its gradient."""

import functools

import torch
from torch import Tensor

from rlkernel.calls.preference_loss import PAIR_METRICS, PreferenceLossCall, PreferenceLossResults
from rlkernel.drivers.preference_loss import order
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops.preference_loss_kernels import COLUMNS, gradient_kernel, loss_kernel, sums_kernel
from rlkernel.triton_ops.preference_loss_terms import Term

_BLOCK = 1024  # fixed: the order of a sequence's sums must not follow from the padding


unsupported = taking("logprobs")


def forward(call: PreferenceLossCall) -> PreferenceLossResults:
    return loss(call, sums(call))


def sums(call: PreferenceLossCall) -> Tensor:
    logprobs, ref_logprobs, cu_seqlens = call.logprobs, call.ref_logprobs, call.cu_seqlens
    rows, ld_alpha = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, call.rule.ld_alpha
    stats = torch.empty(rows, COLUMNS.value, dtype=torch.float64, device=logprobs.device)
    per_token = ref_logprobs is not None and ref_logprobs.shape == logprobs.shape
    with torch.cuda.device_of(logprobs):
        if rows:
            sums_kernel[(rows,)](
                logprobs, ref_logprobs, _bytes(call.mask), _bytes(call.nll_mask), call.log_sum_sq_probs,
                cu_seqlens, stats, logprobs.shape[-1], rows // 2, ld_alpha, REF_PER_TOKEN=per_token,
                LENGTH_DESENSITISED=ld_alpha != 1, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return stats


def loss(call: PreferenceLossCall, stats: Tensor) -> PreferenceLossResults:
    rows, kl, r = stats.shape[0], call.kl, call.rule
    new = functools.partial(torch.empty, dtype=call.logprobs.dtype, device=stats.device)
    total, metrics, rewards, logps = new(()), new(len(PAIR_METRICS)), new(rows), new(rows)
    slopes = torch.empty(rows + 1, dtype=torch.float64, device=stats.device)
    delta = None if call.running_delta is None else new(2)
    with torch.cuda.device_of(stats):  # with 4 warps the compiler aims at fewer registers, and spills
        loss_kernel[(1,)](
            stats, rows, _bytes(call.labels), kl, order(call, stats), call.items, call.nll_items,
            call.running_delta, total, metrics, slopes, rewards, logps, delta, r.weights, r.smoothing, r.beta,
            r.gamma, r.discopop_tau, r.exponent, r.nll_coef, r.desirable_weight, r.undesirable_weight,
            r.factor, r.items, r.nll_items, TERMS=r.terms, N=len(r.terms), PER_TOKEN=r.per_token,
            WEIGHTING=r.weighting, DIVERGENCE=r.divergence, KL_PER_ROW=kl is not None and kl.numel() != 1,
            LIKELY=r.nll_coef != 0 or Term.sft in r.terms, ODDS=Term.orpo in r.terms, BLOCK=256, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return PreferenceLossResults(total, metrics, rewards, logps, delta, stats, slopes)


def backward(call: PreferenceLossCall, results: PreferenceLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    mask, rows, ld_alpha = call.mask, results.sums.shape[0], call.rule.ld_alpha
    grad = torch.empty(mask.shape, dtype=grad_loss.dtype, device=mask.device)
    if rows == 0:
        return (grad.zero_(),)
    with torch.cuda.device_of(mask):
        gradient_kernel[(rows,)](
            grad_loss, results.slopes, results.sums, _bytes(mask), _bytes(call.nll_mask),
            _bytes(call.labels), call.cu_seqlens, rows, mask.shape[-1], ld_alpha, grad,
            LENGTH_DESENSITISED=ld_alpha != 1, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return (grad,)


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)
