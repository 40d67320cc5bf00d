"""Calls of ``policy_loss`` of every term, and of the choices of kl_cov and clip_cov."""

import math

import torch

from rlkernel.calls.policy_loss import CovariancePick, PolicyLossCall, PolicySelectCall
from rlkernel.ops.policy_loss import DEFAULTS
from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection
from rlkernel.ops.policy_loss.rule import build
from rlkernel.triton_ops import policy_loss


def cases():
    there = dict.fromkeys(("has_rollout", "has_rollout_logprobs", "has_staleness"), True)

    def case(extras, **options):
        x = torch.zeros(2, 64)
        rule = build(has_reference=extras, **there, **DEFAULTS | options)
        more = x if extras else None
        mask = torch.ones(2, 64, dtype=torch.bool)
        picked = mask if options.get("loss_type") in ("clip_cov", "kl_cov") else None
        stale = x if rule.max_staleness < math.inf else None
        call = PolicyLossCall(x, more, x, x, mask, None, more, more, stale, None, picked, rule, extras)
        return lambda: policy_loss.forward(call)

    def choice(by_hash, packed):
        x, mask = torch.zeros(2, 64), torch.ones(2, 64, dtype=torch.bool)
        offsets = torch.tensor([0, 60, 128]) if packed else None
        shape = (-1,) if packed else (2, 64)
        pick = CovariancePick(by_hash, 0.1, 1.0, 5.0, 0.8, 1.2, 7)
        old, advantages = (x.view(shape), x.view(shape)) if by_hash else (None, x[:, 0].contiguous())
        call = PolicySelectCall(x.view(shape), old, advantages, mask.view(shape), offsets, pick)
        return lambda: policy_loss.select(call)

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
