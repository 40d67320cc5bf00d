"""From the arguments of ``policy_loss`` to the numbers that a kernel takes: the home of all names."""

import math
from collections.abc import Mapping
from typing import Any

from rlkernel.calls.policy_loss import (
    DIVERGENCES,
    KL_ESTIMATORS,
    KL_WEIGHTS,
    LEVELS,
    POLICY_TERMS,
    SUMS,
    PolicyRule,
)
from rlkernel.ops.policy_loss import rollout_correction
from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection, choice
from rlkernel.ops.policy_loss.rollout_correction import number as _number
from rlkernel.runtime.memo import remembered

LOSS_TYPES = {
    "grpo": "clipped",
    "ppo": "clipped",
    "dapo": "clipped",
    "dr_grpo": "clipped",
    "bnpo": "clipped",
    "cispo": "cispo",
    "cispo_cap": "cispo",
    "cispo_mask": "cispo_mask",
    "reinforce": "reinforce",
    "gpg": "reinforce",
    "sapo": "sapo",
    "gmpo": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "vespo": "vespo",
    "clip_cov": "clipped",
    "kl_cov": "surrogate",
    "importance_sampling": "surrogate",
    "dro": "dro",
}

# Whose logprobs the derivative of a token needs at level "token", as far as it is known: its own, or its
# sequence's.  Of a loss that is not named it may need the whole batch's.
REACH = {
    **dict.fromkeys(("grpo", "ppo", "dapo", "dr_grpo", "bnpo", "cispo", "cispo_cap", "reinforce"), "token"),
    **dict.fromkeys(("gpg", "sapo", "gmpo", "dppo_tv", "dppo_kl", "dro"), "token"),
    **dict.fromkeys(("cispo_mask", "importance_sampling"), "token"),
    "vespo": "sequence",
}
# fields of the rule that leave it at that, whatever they are
REACH_KNOWS = frozenset((
    "term", "level", "aggregation", "kl", "kl_gradient_of_k2", "kl_weight", "kl_input", "kl_output",
    "divergence", "correction", "verdict", "shrink", "stale_only", "low", "high", "delta", "dual",
    "log_clip", "tau_positive", "tau_negative", "beta", "entropy_coef", "k_positive", "lambda_positive",
    "k_negative", "lambda_negative", "coefficient", "weight_low", "weight_high", "log_weight_low",
    "log_weight_high", "token_low", "token_high", "extreme_low", "extreme_high", "sum_k1_low",
    "sum_k1_high", "mean_k1_low", "mean_k1_high", "sum_k2_high", "mean_k2_high", "sum_k3_high",
    "mean_k3_high", "tv_high", "max_staleness", "log_decay", "denominator", "factor",
))  # fmt: skip

AGGREGATIONS = {
    "token-mean": "tokens",
    "token-sum": "tokens",
    "seq-mean-token-sum": "sequence_sums",
    "seq-mean-token-sum-norm": "sequence_sums",
    "seq-mean-token-mean": "sequence_means",
}

# of use_bias_correction_kl, whose True is TRL's
KL_FACTORS = {False: "none", True: "ratio"} | {name: name for name in KL_WEIGHTS[1:]}

KL = {f"{name}{plus}": name for name in KL_ESTIMATORS[1:] for plus in ("", "+")}

# What each paper sums over; the arguments beside it are those that its authors publish.
PRESETS: Mapping[str, dict[str, Any]] = {
    "ppo": {"loss_type": "ppo", "loss_agg_mode": "token-mean"},
    "grpo": {"loss_type": "grpo", "loss_agg_mode": "seq-mean-token-mean"},
    "dapo": {"loss_type": "dapo", "loss_agg_mode": "token-mean", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "bnpo": {"loss_type": "bnpo", "loss_agg_mode": "token-mean"},
    "gspo": {
        "importance_sampling_level": "sequence",
        "loss_agg_mode": "seq-mean-token-mean",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "gspo_token": {
        "importance_sampling_level": "sequence_token",
        "loss_agg_mode": "seq-mean-token-mean",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "luspo": {"importance_sampling_level": "sequence", "loss_agg_mode": "seq-mean-token-sum"},
    "cispo": {"loss_type": "cispo", "loss_agg_mode": "token-mean"},
    "reinforce": {"loss_type": "reinforce", "loss_agg_mode": "seq-mean-token-sum"},
    "gpg": {"loss_type": "gpg", "loss_agg_mode": "token-mean"},
    "sapo": {"loss_type": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "gmpo": {
        "loss_type": "gmpo",
        "importance_sampling_level": "sequence",
        "loss_agg_mode": "seq-mean-token-mean",
        "epsilon": 0.4,
    },
    "dppo_tv": {"loss_type": "dppo_tv", "loss_agg_mode": "token-mean"},
    "dppo_kl": {"loss_type": "dppo_kl", "loss_agg_mode": "token-mean"},
    "vespo": {"loss_type": "vespo", "loss_agg_mode": "token-mean"},
    "clip_cov": {"loss_type": "clip_cov", "loss_agg_mode": "token-mean"},
    "kl_cov": {"loss_type": "kl_cov", "loss_agg_mode": "token-mean"},
}


def optional(argument: str, value: float | None, otherwise: float, low: float = 0.0) -> float:
    """A number > ``low``, or what None stands for."""
    return otherwise if value is None else _number(argument, value, low, above=True)


@remembered
def build(
    *,
    loss_type: str,
    loss_agg_mode: str,
    importance_sampling_level: str,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
    clip_ratio_c: float | None,
    log_ratio_clip: float | None,
    tau_pos: float,
    tau_neg: float,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
    ppo_kl_coef: float,
    dro_beta: float | None,
    beta: float,
    has_reference: bool,
    kl_estimator: str,
    use_bias_correction_kl: bool | str,
    kl_input_clamp: float | None,
    kl_output_clamp: float | None,
    has_rollout: bool,
    has_rollout_logprobs: bool,
    has_staleness: bool,
    has_token_counts: bool,
    correction: RolloutCorrection | str | None,
    entropy_coef: float,
    num_items_in_batch: float | None,
    loss_scale_factor: float | None,
    dp_size: int,
    length: int | None,
) -> PolicyRule:
    """Raises ValueError for the first argument that is off."""
    term = choice("loss_type", loss_type, LOSS_TYPES)
    aggregation = choice("loss_agg_mode", loss_agg_mode, AGGREGATIONS)
    level = choice(
        "importance_sampling_level",
        importance_sampling_level,
        {name: i for i, name in enumerate(LEVELS)},
    )
    estimator = choice("kl_estimator", kl_estimator, KL)
    kl_weight = choice("use_bias_correction_kl", use_bias_correction_kl, KL_FACTORS)
    epsilon = _number("epsilon", epsilon, 0.0)
    above = epsilon if epsilon_high is None else _number("epsilon_high", epsilon_high, 0.0)
    beta = _number("beta", beta, 0.0)
    if beta and not has_reference:
        raise ValueError(f"ref_logprobs must be given with beta = {beta}, got None")
    if kl_weight == "rollout" and not has_rollout_logprobs:
        raise ValueError("rollout_logprobs must be given with use_bias_correction_kl = 'rollout', got None")
    low, high = (-epsilon, above) if term in ("gmpo", "dppo") else (1 - epsilon, 1 + above)
    if loss_type == "cispo_cap":  # TRL's epsilon_high is the cap itself
        low, high = -math.inf, above
    factor = _number("dp_size", dp_size, 0, above=True)
    denominator = 0.0
    if loss_agg_mode == "token-sum":
        denominator = 1.0
    elif num_items_in_batch is not None:
        denominator = _number("num_items_in_batch", num_items_in_batch, 0, above=True)
    if num_items_in_batch is None and dp_size > 1 and loss_agg_mode != "token-sum":
        raise ValueError(f"num_items_in_batch must be given with dp_size = {dp_size}, got None")
    if has_token_counts and loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"loss_agg_mode must be 'seq-mean-token-mean' with token_counts, got {loss_agg_mode!r}"
        )
    if has_token_counts and num_items_in_batch is None:
        raise ValueError("num_items_in_batch must be given with token_counts, got None")
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None and length is None:
            raise ValueError("loss_scale_factor must be given with cu_seqlens for this mode, got None")
        scale = max(length or 1, 1) if loss_scale_factor is None else loss_scale_factor
        factor /= _number("loss_scale_factor", scale, 0, above=True)
    coefficient = _number("ppo_kl_coef", ppo_kl_coef, 0.0)
    if term == "dro":
        if dro_beta is None:
            raise ValueError("dro_beta must be given with loss_type 'dro', got None")
        coefficient = _number("dro_beta", dro_beta, 0.0, above=True)
    rollout = rollout_correction.numbers(correction, has_rollout, has_staleness)
    return PolicyRule(
        term=POLICY_TERMS.index(term),
        level=level,
        aggregation=SUMS.index(aggregation),
        # without beta the estimate is still worth a metric
        kl=KL_ESTIMATORS.index(estimator) if has_reference else 0,
        kl_gradient_of_k2=kl_estimator.endswith("+"),
        kl_weight=KL_WEIGHTS.index(kl_weight),
        divergence=DIVERGENCES.index(loss_type[5:]) if term == "dppo" else 0,
        low=low,
        high=high,
        delta=optional("delta", delta, math.inf),
        dual=optional("clip_ratio_c", clip_ratio_c, 20.0 if term == "dppo" else math.inf, 1.0),
        log_clip=optional("log_ratio_clip", log_ratio_clip, math.inf),
        tau_positive=_number("tau_pos", tau_pos, 0, above=True),
        tau_negative=_number("tau_neg", tau_neg, 0, above=True),
        beta=beta,
        kl_input=optional("kl_input_clamp", kl_input_clamp, math.inf),
        kl_output=optional("kl_output_clamp", kl_output_clamp, math.inf),
        entropy_coef=_number("entropy_coef", entropy_coef),
        k_positive=_number("vespo_k_pos", vespo_k_pos),
        lambda_positive=max(_number("vespo_lambda_pos", vespo_lambda_pos), 1e-4),
        k_negative=_number("vespo_k_neg", vespo_k_neg),
        lambda_negative=max(_number("vespo_lambda_neg", vespo_lambda_neg), 1e-4),
        coefficient=coefficient,
        **rollout,
        denominator=denominator,
        factor=factor,
    )
