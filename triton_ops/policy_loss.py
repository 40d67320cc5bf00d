"""``policy_loss`` over Triton: a program for each sequence, then one that joins their sums."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.triton_ops.policy_loss_kernels import COLUMNS, sequence_kernel, values_kernel
from rlkernel.types import POLICY_METRICS, PolicyRule

_BLOCK = 1024  # fixed: the order of a sequence's sums must not follow from the padding


def unsupported(*tensors: Tensor, **options: object) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if not logprobs.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {logprobs.device}")
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be float32, float16 or bfloat16, got torch.float64")
    return reasons


def forward(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    entropy: Tensor | None,
    rule: PolicyRule,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    device = logprobs.device
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    length = logprobs.shape[-1]
    values = torch.empty(2 + len(POLICY_METRICS), dtype=torch.float32, device=device)
    partials = torch.empty(rows, COLUMNS, dtype=torch.float64, device=device)
    grad_logprobs = torch.empty_like(logprobs)
    grad_entropy = torch.empty_like(logprobs) if entropy is not None and entropy_gradient else None
    r = rule
    with torch.cuda.device_of(logprobs):
        if rows:
            sequence_kernel[(rows,)](
                logprobs, old_logprobs, advantages, mask.view(torch.uint8), cu_seqlens, ref_logprobs,
                rollout_logprobs, entropy, grad_logprobs, grad_entropy, partials, length,
                r.low, r.high, r.delta, r.dual, r.log_clip, r.tau_positive, r.tau_negative, r.beta,
                r.entropy_coef, r.weight_low, r.weight_high, r.log_veto,
                PER_TOKEN=advantages.shape == logprobs.shape, TERM=r.term, LEVEL=r.level,
                MEANS=r.aggregation == 2, KL=r.kl, KL_OF_K2=r.kl_gradient_of_k2, KL_RATIO=r.kl_times_ratio,
                CORRECTION=r.correction, VERDICT=r.verdict, SHRINK=r.shrink, BLOCK=_BLOCK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
        values_kernel[(1,)](
            partials, rows, values, r.denominator, r.factor, BY_TOKEN=r.aggregation == 0, BLOCK=256,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return values, grad_logprobs, grad_entropy


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""
    from rlkernel.ops import _policy_rule

    defaults: dict[str, Any] = {
        "loss_type": "grpo", "loss_agg_mode": "token-mean", "importance_sampling_level": "token",
        "epsilon": 0.2, "epsilon_high": None, "delta": None, "clip_ratio_c": None, "log_ratio_clip": None,
        "tau_pos": 1.0, "tau_neg": 1.05, "beta": 0.0, "has_reference": False, "kl_estimator": "k3",
        "use_bias_correction_kl": False, "has_rollout": True, "correction": None, "entropy_coef": 0.0,
        "num_items_in_batch": None, "loss_scale_factor": None, "dp_size": 1, "length": 64,
    }  # fmt: skip

    def case(extras: bool, **options: Any) -> Callable[[], object]:
        x = torch.zeros(2, 64)
        rule = _policy_rule.build(**(defaults | options | {"has_reference": extras}))
        more = x if extras else None
        mask = torch.ones(2, 64, dtype=torch.bool)
        return lambda: forward(x, x, x, mask, None, more, more, more, rule, extras)

    sequence = {"importance_sampling_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"}
    return {
        "clipped": case(False),
        "clipped, everything": case(True, beta=0.1, entropy_coef=0.1, correction="icepop"),
        "sequence, everything": case(True, beta=0.1, correction="skyrl:geometric", **sequence),
        "cispo": case(False, loss_type="cispo"),
        "sapo": case(False, loss_type="sapo"),
        "gmpo": case(False, loss_type="gmpo", **sequence),
        "dppo_tv": case(False, loss_type="dppo_tv"),
    }
