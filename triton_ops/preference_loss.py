"""``preference_loss`` over Triton: a program for each sequence sums it, one makes the loss, one each writes
its gradient."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.triton_ops.preference_loss_kernels import COLUMNS, gradient_kernel, loss_kernel, sums_kernel
from rlkernel.triton_ops.preference_loss_terms import Term
from rlkernel.types import PAIR_METRICS, PreferenceRule

_BLOCK = 1024  # fixed: the order of a sequence's sums must not follow from the padding


def unsupported(*tensors: Tensor, **options: object) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if not logprobs.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {logprobs.device}")
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be float32, float16 or bfloat16, got torch.float64")
    return reasons


def sums(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    nll_mask: Tensor | None,
    log_sum_sq_probs: Tensor | None,
    cu_seqlens: Tensor | None,
    paired: bool,
    ld_alpha: float,
) -> Tensor:
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    stats = torch.empty(rows, COLUMNS.value, dtype=torch.float64, device=logprobs.device)
    per_token = ref_logprobs is not None and ref_logprobs.shape == logprobs.shape
    with torch.cuda.device_of(logprobs):
        if rows:
            sums_kernel[(rows,)](
                logprobs, ref_logprobs, _bytes(mask), _bytes(nll_mask), log_sum_sq_probs, cu_seqlens, stats,
                logprobs.shape[-1], rows // 2, ld_alpha, REF_PER_TOKEN=per_token,
                LENGTH_DESENSITISED=ld_alpha != 1,
                BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return stats


def loss(
    stats: Tensor,
    labels: Tensor | None,
    kl: Tensor | None,
    order: Tensor | None,
    items: Tensor | None,
    nll_items: Tensor | None,
    running_delta: Tensor | None,
    rule: PreferenceRule,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    rows, device, r = stats.shape[0], stats.device, rule
    total = torch.empty((), dtype=dtype, device=device)
    metrics = torch.empty(len(PAIR_METRICS), dtype=dtype, device=device)
    slopes = torch.empty(rows + 1, dtype=torch.float64, device=device)
    rewards, logps = (torch.empty(rows, dtype=dtype, device=device) for _ in range(2))
    delta = None if running_delta is None else torch.empty(2, dtype=dtype, device=device)
    with torch.cuda.device_of(stats):  # with 4 warps the compiler aims at fewer registers, and spills
        loss_kernel[(1,)](
            stats, rows, _bytes(labels), kl, order, items, nll_items, running_delta, total, metrics, slopes,
            rewards,
            logps, delta, r.weights, r.smoothing, r.beta, r.gamma, r.discopop_tau, r.exponent, r.nll_coef,
            r.desirable_weight, r.undesirable_weight, r.factor, r.items, r.nll_items, TERMS=r.terms,
            N=len(r.terms),
            PER_TOKEN=r.per_token, WEIGHTING=r.weighting, DIVERGENCE=r.divergence,
            KL_PER_ROW=kl is not None and kl.numel() != 1, LIKELY=r.nll_coef != 0 or Term.sft in r.terms,
            ODDS=Term.orpo in r.terms, BLOCK=256,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return total, metrics, slopes, rewards, logps, delta


def backward(
    grad_loss: Tensor,
    slopes: Tensor,
    stats: Tensor,
    mask: Tensor,
    nll_mask: Tensor | None,
    labels: Tensor | None,
    cu_seqlens: Tensor | None,
    ld_alpha: float,
) -> Tensor:
    grad = torch.empty(mask.shape, dtype=grad_loss.dtype, device=mask.device)
    rows = stats.shape[0]
    if rows == 0:
        return grad.zero_()
    with torch.cuda.device_of(mask):
        gradient_kernel[(rows,)](
            grad_loss, slopes, stats, _bytes(mask), _bytes(nll_mask), _bytes(labels), cu_seqlens, rows,
            mask.shape[-1], ld_alpha, grad, LENGTH_DESENSITISED=ld_alpha != 1, BLOCK=_BLOCK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return grad


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""
    from rlkernel.ops import _preference_rule

    defaults: dict[str, Any] = {
        "loss_weights": None, "beta": 0.1, "label_smoothing": 0.0, "gamma": 0.5, "discopop_tau": 0.05,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "ld_alpha": None,
        "use_weighting": False,
        "nll_coef": None, "desirable_weight": 1.0, "undesirable_weight": 1.0, "num_items_in_batch": None,
        "num_tokens_in_batch": None, "dp_size": 1, "has_reference": False,
    }  # fmt: skip

    def case(
        loss_type: Any, extras: bool = False, unpaired: bool = False, **options: Any
    ) -> Callable[[], object]:
        rule = _preference_rule.build(**(defaults | options | {"loss_type": loss_type}))
        x, mask = torch.zeros(4, 64), torch.ones(4, 64, dtype=torch.bool)
        offsets = torch.arange(5) * 64 if extras else None
        tokens = x.view(-1) if extras else x
        kept = mask.view(-1) if extras else mask
        labels = mask[:, 0].clone() if unpaired else None
        number = torch.ones(1, dtype=torch.float64) if extras else None
        order = torch.zeros(4, 2, dtype=torch.int64)
        delta = torch.zeros(2) if extras and not unpaired else None

        def call() -> None:
            more = tokens if extras else None
            stats = sums(
                tokens, tokens, kept, kept if extras else None, more, offsets, not unpaired, rule.ld_alpha
            )
            _, _, slopes, *_ = loss(
                stats,
                labels,
                x[0, :4] if unpaired else None,
                order,
                number,
                number,
                delta,
                rule,
                torch.float32,
            )
            backward(x[0, 0], slopes, stats, kept, kept if extras else None, labels, offsets, rule.ld_alpha)

        return call

    several = ("sigmoid", "bco_pair", "sft", "aot", "orpo", "exo_pair")
    return {
        "sigmoid": case("sigmoid"),
        "several, everything": case(several, True, ld_alpha=0.5, label_smoothing=0.1),
        "weighted, js": case(("sigmoid_norm", "ipo"), use_weighting=True, f_divergence_type="js_divergence"),
        "discopop, alpha": case("discopop", f_divergence_type="alpha_divergence"),
        "simpo": case("simpo", nll_coef=1.0),
        "aot_unpaired": case("aot_unpaired"),
        "kto packed": case("kto", True, unpaired=True),
    }
