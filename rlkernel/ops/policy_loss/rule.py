"""From the arguments of ``policy_loss`` to the numbers that a kernel takes: the home of all names."""

import math
from collections.abc import Mapping
from typing import Any

from rlkernel.calls import policy_loss as names
from rlkernel.calls.policy_loss import PolicyRule
from rlkernel.ops.policy_loss import rollout_correction
from rlkernel.ops.policy_loss.rollout_correction import choice
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
KL_FACTORS = {False: "none", True: "ratio"} | {name: name for name in names.KL_WEIGHTS[1:]}

_LEVELS = {name: i for i, name in enumerate(names.LEVELS)}

KL = {f"{name}{plus}": name for name in names.KL_ESTIMATORS[1:] for plus in ("", "+")}

_GSPO = {"loss_agg_mode": "seq-mean-token-mean", "epsilon": 3e-4, "epsilon_high": 4e-4}
# What each paper sums over; the arguments beside it are those that its authors publish.
PRESETS: Mapping[str, dict[str, Any]] = {
    "ppo": {"loss_type": "ppo", "loss_agg_mode": "token-mean"},
    "grpo": {"loss_type": "grpo", "loss_agg_mode": "seq-mean-token-mean"},
    "dapo": {"loss_type": "dapo", "loss_agg_mode": "token-mean", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "bnpo": {"loss_type": "bnpo", "loss_agg_mode": "token-mean"},
    "gspo": {"importance_sampling_level": "sequence", **_GSPO},
    "gspo_token": {"importance_sampling_level": "sequence_token", **_GSPO},
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
    has_reference: bool = False,
    has_rollout: bool = False,
    has_rollout_logprobs: bool = False,
    has_staleness: bool = False,
    has_token_counts: bool = False,
    length: int | None = 1,
    **options: Any,
) -> PolicyRule:
    """``options`` are the keywords of ``policy_loss``; of those that are tensors ``build`` is told whether
    they are there.  Raises ValueError for the first that is off."""

    def number(name: str, low: float = -math.inf, *, above: bool = False) -> float:
        return _number(name, options[name], low, above=above)

    def bound(name: str, absent: float = math.inf, low: float = 0.0) -> float:
        return optional(name, options[name], absent, low)

    loss_type, loss_agg_mode = options["loss_type"], options["loss_agg_mode"]
    term = choice("loss_type", loss_type, LOSS_TYPES)
    aggregation = choice("loss_agg_mode", loss_agg_mode, AGGREGATIONS)
    level = choice("importance_sampling_level", options["importance_sampling_level"], _LEVELS)
    estimator = choice("kl_estimator", options["kl_estimator"], KL)
    kl_weight = choice("use_bias_correction_kl", options["use_bias_correction_kl"], KL_FACTORS)
    epsilon = number("epsilon", 0.0)
    above = epsilon if options["epsilon_high"] is None else number("epsilon_high", 0.0)
    beta = number("beta", 0.0)
    if beta and not has_reference:
        raise ValueError(f"ref_logprobs must be given with beta = {beta}, got None")
    if kl_weight == "rollout" and not has_rollout_logprobs:
        raise ValueError("rollout_logprobs must be given with use_bias_correction_kl = 'rollout', got None")
    low, high = (-epsilon, above) if term in ("gmpo", "dppo") else (1 - epsilon, 1 + above)
    if loss_type == "cispo_cap":  # TRL's epsilon_high is the cap itself
        low, high = -math.inf, above
    factor = number("dp_size", 0, above=True)
    items, denominator = options["num_items_in_batch"], 0.0
    if loss_agg_mode == "token-sum":
        denominator = 1.0
    elif items is not None:
        denominator = number("num_items_in_batch", 0, above=True)
    elif factor > 1:
        raise ValueError(f"num_items_in_batch must be given with dp_size = {options['dp_size']}, got None")
    if has_token_counts and loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"loss_agg_mode must be 'seq-mean-token-mean' with token_counts, got {loss_agg_mode!r}"
        )
    if has_token_counts and items is None:
        raise ValueError("num_items_in_batch must be given with token_counts, got None")
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = options["loss_scale_factor"]
        if scale is None and length is None:
            raise ValueError("loss_scale_factor must be given with cu_seqlens for this mode, got None")
        factor /= _number("loss_scale_factor", max(length or 1, 1) if scale is None else scale, 0, above=True)
    coefficient = number("ppo_kl_coef", 0.0)
    if term == "dro":
        if options["dro_beta"] is None:
            raise ValueError("dro_beta must be given with loss_type 'dro', got None")
        coefficient = number("dro_beta", 0.0, above=True)
    rollout = rollout_correction.numbers(options["correction"], has_rollout, has_staleness)
    return PolicyRule(
        term=names.POLICY_TERMS.index(term),
        level=level,
        aggregation=names.SUMS.index(aggregation),
        # without beta the estimate is still worth a metric
        kl=names.KL_ESTIMATORS.index(estimator) if has_reference else 0,
        kl_gradient_of_k2=options["kl_estimator"].endswith("+"),
        kl_weight=names.KL_WEIGHTS.index(kl_weight),
        divergence=names.DIVERGENCES.index(loss_type[5:]) if term == "dppo" else 0,
        low=low,
        high=high,
        delta=bound("delta"),
        dual=bound("clip_ratio_c", 20.0 if term == "dppo" else math.inf, 1.0),
        log_clip=bound("log_ratio_clip"),
        tau_positive=number("tau_pos", 0, above=True),
        tau_negative=number("tau_neg", 0, above=True),
        beta=beta,
        kl_input=bound("kl_input_clamp"),
        kl_output=bound("kl_output_clamp"),
        entropy_coef=number("entropy_coef"),
        k_positive=number("vespo_k_pos"),
        lambda_positive=max(number("vespo_lambda_pos"), 1e-4),
        k_negative=number("vespo_k_neg"),
        lambda_negative=max(number("vespo_lambda_neg"), 1e-4),
        coefficient=coefficient,
        **rollout,
        denominator=denominator,
        factor=factor,
    )
