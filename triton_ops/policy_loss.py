"""``policy_loss`` over Triton: a program for each sequence, then one that joins their sums."""

import math
import os
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.policy_loss import (
    POLICY_CHOICES,
    CovariancePick,
    PolicyLossCall,
    PolicyLossResults,
    PolicyRule,
    PolicySelectCall,
    PolicySelectResults,
)
from rlkernel.triton_ops.policy_loss_kernels import (
    COLUMNS,
    Value,
    mean_weight_kernel,
    sequence_kernel,
    values_kernel,
    weights_kernel,
)
from rlkernel.triton_ops.policy_loss_selection import selection
from rlkernel.triton_ops.policy_loss_terms import Aggregate

# what is compiled in, and what is not; Triton takes a named tuple as one argument
_FIELDS = PolicyRule._fields
_Choices = namedtuple("_Choices", (*_FIELDS[:POLICY_CHOICES], "rejects_k2", "rejects_k3", "tv", "off_policy"))  # type: ignore[misc]
_Numbers = namedtuple("_Numbers", _FIELDS[POLICY_CHOICES:])  # type: ignore[misc]
_BLOCK = 1024  # fixed: the order of a sequence's sums must not follow from the padding


def unsupported(*tensors: Tensor, **options: object) -> list[str]:
    logprobs = tensors[0]
    reasons = []
    if not logprobs.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {logprobs.device}")
    if logprobs.dtype == torch.float64:
        reasons.append("logprobs must be float32, float16 or bfloat16, got torch.float64")
    return reasons


def forward(call: PolicyLossCall) -> PolicyLossResults:
    logprobs, old_logprobs, advantages = call.logprobs, call.old_logprobs, call.advantages
    mask, cu_seqlens, rollout_logprobs = call.mask.view(torch.uint8), call.cu_seqlens, call.rollout_logprobs
    staleness, rule = call.staleness, call.rule
    device = logprobs.device
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    length = logprobs.shape[-1]
    values = torch.empty(len(Value), dtype=torch.float32, device=device)
    partials = torch.empty(rows, COLUMNS.value, dtype=torch.float64, device=device)
    grad_logprobs = torch.empty_like(logprobs)
    grad_entropy = torch.empty_like(logprobs) if call.entropy_gradient else None
    picked = None if call.selected is None else call.selected.view(torch.uint8)
    numbers = _Numbers(*rule[POLICY_CHOICES:])
    choices = _Choices._make(
        [
            *(int(x) for x in rule[:POLICY_CHOICES]),
            min(rule.sum_k2_high, rule.mean_k2_high) < math.inf,
            min(rule.sum_k3_high, rule.mean_k3_high) < math.inf,
            rule.tv_high < math.inf,
            rule.off_policy_high < math.inf,
        ]
    )
    stale_per_token = staleness is not None and staleness.shape == logprobs.shape
    with torch.cuda.device_of(logprobs):
        if rows and rule.normalize:
            weights_kernel[(rows,)](
                logprobs, old_logprobs, mask, cu_seqlens, rollout_logprobs, staleness, partials, length,
                numbers, C=choices, STALE_PER_TOKEN=stale_per_token, BLOCK=_BLOCK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
            mean_weight_kernel[(1,)](partials, rows, values, BLOCK=256, num_warps=4, enable_fp_fusion=False)
        if rows:
            sequence_kernel[(rows,)](
                logprobs, old_logprobs, advantages, mask, cu_seqlens, call.ref_logprobs, rollout_logprobs,
                call.entropy, staleness, picked, call.token_counts, grad_logprobs, grad_entropy, partials,
                values, length, numbers, C=choices, PER_TOKEN=advantages.shape == logprobs.shape,
                STALE_PER_TOKEN=stale_per_token, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        values_kernel[(1,)](
            partials, rows, values, rule.denominator, rule.factor,
            BY_TOKEN=rule.aggregation == Aggregate.tokens, BLOCK=256, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    # ``data``: tensors of their own, that a caller may modify in place, and no kernel to copy them
    return PolicyLossResults(values[0].data, values[2:-1].data, values[1], grad_logprobs, grad_entropy)


def select(call: PolicySelectCall) -> PolicySelectResults:
    return PolicySelectResults(selection(*call))


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""
    from rlkernel.ops.policy_loss import rule as policy_rule
    from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection

    defaults: dict[str, Any] = {
        "loss_type": "grpo", "loss_agg_mode": "token-mean", "importance_sampling_level": "token",
        "epsilon": 0.2, "epsilon_high": None, "delta": None, "clip_ratio_c": None, "log_ratio_clip": None,
        "tau_pos": 1.0, "tau_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0, "ppo_kl_coef": 1.0, "dro_beta": 1.0, "beta": 0.0, "has_reference": False,
        "kl_estimator": "k3", "use_bias_correction_kl": False, "kl_input_clamp": None,
        "kl_output_clamp": None, "has_rollout": True, "has_rollout_logprobs": True, "has_staleness": True,
        "has_token_counts": False,
        "correction": None, "entropy_coef": 0.0,
        "num_items_in_batch": None, "loss_scale_factor": None, "dp_size": 1, "length": 64,
    }  # fmt: skip

    def case(extras: bool, **options: Any) -> Callable[[], object]:
        x = torch.zeros(2, 64)
        rule = policy_rule.build(**(defaults | options | {"has_reference": extras}))
        more = x if extras else None
        mask = torch.ones(2, 64, dtype=torch.bool)
        picked = mask if options.get("loss_type") in ("clip_cov", "kl_cov") else None
        stale = x if rule.max_staleness < math.inf else None
        call = PolicyLossCall(x, more, x, x, mask, None, more, more, stale, None, picked, rule, extras)
        return lambda: forward(call)

    def choice(by_hash: bool, packed: bool) -> Callable[[], object]:
        x, mask = torch.zeros(2, 64), torch.ones(2, 64, dtype=torch.bool)
        offsets = torch.tensor([0, 60, 128]) if packed else None
        shape = (-1,) if packed else (2, 64)
        pick = CovariancePick(by_hash, 0.1, 1.0, 5.0, 0.8, 1.2, 7)
        old, advantages = (x.view(shape), x.view(shape)) if by_hash else (None, x[:, 0].contiguous())
        call = PolicySelectCall(x.view(shape), old, advantages, mask.view(shape), offsets, pick)
        return lambda: select(call)

    rejections = RolloutCorrection(
        "sequence", normalize=True, denominator="shrink", dppo=("kl", 0.2, 0.2), off_policy_threshold=0.5,
        two_sided=True, tv_threshold=0.5,
        max_staleness=4, staleness_decay=0.9, reject=(("seq_sum_k2", 1.0), ("seq_mean_k3", 0.1)),
    )  # fmt: skip
    sequence = {"importance_sampling_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"}
    return {
        "clipped": case(False),
        "clipped, everything": case(True, beta=0.1, entropy_coef=0.1, correction="icepop"),
        "sequence, everything": case(True, beta=0.1, correction="skyrl:geometric", **sequence),
        "cispo": case(False, loss_type="cispo"),
        "cispo_mask": case(False, loss_type="cispo_mask"),
        "sapo": case(False, loss_type="sapo"),
        "gmpo": case(False, loss_type="gmpo", **sequence),
        "dppo_tv": case(False, loss_type="dppo_tv"),
        "dppo_kl": case(False, loss_type="dppo_kl"),
        "vespo": case(True, loss_type="vespo", correction="trl:token_mask"),
        "kl_cov": case(False, loss_type="kl_cov"),
        "choice of kl_cov": choice(False, packed=True),
        "choice of clip_cov": choice(True, packed=False),
        "every rejection": case(True, correction=rejections),
        "bounded kl": case(
            True, beta=0.1, use_bias_correction_kl="rollout", kl_input_clamp=20.0, kl_output_clamp=10.0
        ),
    }
