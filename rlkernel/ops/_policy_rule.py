"""From the arguments of ``policy_loss`` to the numbers that a kernel takes: the home of all names."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from rlkernel.types import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    KL_ESTIMATORS,
    LEVELS,
    POLICY_TERMS,
    SUMS,
    PolicyRule,
)

T = TypeVar("T")

LOSS_TYPES = {
    "grpo": "clipped",
    "ppo": "clipped",
    "dapo": "clipped",
    "dr_grpo": "clipped",
    "bnpo": "clipped",
    "cispo": "cispo",
    "cispo_cap": "cispo",
    "reinforce": "reinforce",
    "gpg": "reinforce",
    "sapo": "sapo",
    "gmpo": "gmpo",
    "dppo_tv": "dppo_tv",
}

AGGREGATIONS = {
    "token-mean": "tokens",
    "token-sum": "tokens",
    "seq-mean-token-sum": "sequence_sums",
    "seq-mean-token-sum-norm": "sequence_sums",
    "seq-mean-token-mean": "sequence_means",
}

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
}


class RolloutCorrection(NamedTuple):
    """A weight for each token against the drift between the rollout engine and the trainer's old policy.

    With ``d = old_logprobs - rollout_logprobs``, the ratio is ``exp(d)`` of the token ("token"), ``exp(sum of
    d)`` of its sequence ("sequence") or ``exp(mean of d)`` ("geometric").  ``mode`` "truncate" clamps it to
    [low, high]; "mask" makes it 0 outside of them (MIS, IcePop); "reject" does the same and is 1 inside.
    ``veto`` rejects every token of a sequence that has a token with ``exp(d) < veto``.  ``denominator``
    "keep" leaves rejected tokens in the mean, as verl and TRL do; "shrink" takes them out of the mask, as
    Miles and SkyRL do.  The weight has no gradient.

    Presets, by name in ``policy_loss(correction=...)``:

        token_tis        min(r, 2), Yao et al. "Your efficient RL framework secretly brings you off-policy RL
                         training"; verl rollout_is="token", slime --tis-clip 2.0
        icepop           r where 0.5 <= r <= 5, else 0; NeMo-RL icepop, verl rollout_is_threshold="0.5_5.0"
        seq_tis          min(sequence r, 2); verl rollout_is="sequence"
        trl:sequence_mask      sequence r where r <= 3, else 0; TRL's default
        trl:sequence_truncate  min(sequence r, 3)
        trl:token_mask         r where r <= 3, else 0
        trl:token_truncate     min(r, 3)
        geometric_rejection    1 where 0.999 <= geometric r <= 1.001, else 0 (verl's documentation)
        skyrl:geometric        1 where 0.99 <= geometric r <= 1.01, tokens leave the mask
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None
    denominator: str = "keep"


CORRECTIONS = {
    "token_tis": RolloutCorrection(),
    "icepop": RolloutCorrection(mode="mask", low=0.5, high=5.0),
    "seq_tis": RolloutCorrection(level="sequence"),
    "trl:sequence_mask": RolloutCorrection(level="sequence", mode="mask", high=3.0),
    "trl:sequence_truncate": RolloutCorrection(level="sequence", high=3.0),
    "trl:token_mask": RolloutCorrection(mode="mask", high=3.0),
    "trl:token_truncate": RolloutCorrection(high=3.0),
    "geometric_rejection": RolloutCorrection("geometric", "reject", 0.999, 1.001),
    "skyrl:geometric": RolloutCorrection("geometric", "reject", 0.99, 1.01, denominator="shrink"),
}


def choice(argument: str, value: str, known: Mapping[str, T]) -> T:
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
    return known[value]


def _number(argument: str, value: float, low: float = -math.inf, *, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{argument} must be a number, got {type(value).__name__}")
    if not (value > low if above else value >= low) or value == math.inf:
        want = "finite" if low == -math.inf else f"finite and {'>' if above else '>='} {low:g}"
        raise ValueError(f"{argument} must be {want}, got {value}")
    return float(value)


def _optional(argument: str, value: float | None, otherwise: float, low: float = 0.0) -> float:
    return otherwise if value is None else _number(argument, value, low, above=True)


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
    beta: float,
    has_reference: bool,
    kl_estimator: str,
    use_bias_correction_kl: bool,
    has_rollout: bool,
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
    epsilon = _number("epsilon", epsilon, 0.0)
    above = epsilon if epsilon_high is None else _number("epsilon_high", epsilon_high, 0.0)
    beta = _number("beta", beta, 0.0)
    if beta and not has_reference:
        raise ValueError(f"ref_logprobs must be given with beta = {beta}, got None")
    low, high = (-epsilon, above) if term in ("gmpo", "dppo_tv") else (1 - epsilon, 1 + above)
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
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None and length is None:
            raise ValueError("loss_scale_factor must be given with cu_seqlens for this mode, got None")
        scale = max(length or 1, 1) if loss_scale_factor is None else loss_scale_factor
        factor /= _number("loss_scale_factor", scale, 0, above=True)
    rollout = _correction(correction, has_rollout)
    return PolicyRule(
        term=POLICY_TERMS.index(term),
        level=level,
        aggregation=SUMS.index(aggregation),
        # without beta the estimate is still worth a metric
        kl=KL_ESTIMATORS.index(estimator) if has_reference else 0,
        kl_gradient_of_k2=kl_estimator.endswith("+"),
        kl_times_ratio=bool(use_bias_correction_kl),
        correction=0 if rollout is None else CORRECTION_LEVELS.index(rollout.level),
        verdict=0 if rollout is None else CORRECTION_MODES.index(rollout.mode),
        shrink=rollout is not None and rollout.denominator == "shrink",
        low=low,
        high=high,
        delta=_optional("delta", delta, math.inf),
        dual=_optional("clip_ratio_c", clip_ratio_c, 20.0 if term == "dppo_tv" else math.inf, 1.0),
        log_clip=_optional("log_ratio_clip", log_ratio_clip, math.inf),
        tau_positive=_number("tau_pos", tau_pos, 0, above=True),
        tau_negative=_number("tau_neg", tau_neg, 0, above=True),
        beta=beta,
        entropy_coef=_number("entropy_coef", entropy_coef),
        weight_low=0.0 if rollout is None else rollout.low,
        weight_high=1.0 if rollout is None else rollout.high,
        log_veto=math.log(rollout.veto) if rollout is not None and rollout.veto else -math.inf,
        denominator=denominator,
        factor=factor,
    )


def _correction(value: RolloutCorrection | str | None, has_rollout: bool) -> RolloutCorrection | None:
    if value is None:
        return None
    c = choice("correction", value, CORRECTIONS) if isinstance(value, str) else value
    if not isinstance(c, RolloutCorrection):
        raise ValueError(f"correction must be a RolloutCorrection or a name, got {type(value).__name__}")
    if not has_rollout:
        raise ValueError("old_logprobs and rollout_logprobs must be given with correction, got None")
    choice("correction.level", c.level, dict.fromkeys(CORRECTION_LEVELS[1:]))
    choice("correction.mode", c.mode, dict.fromkeys(CORRECTION_MODES))
    choice("correction.denominator", c.denominator, dict.fromkeys(("keep", "shrink")))
    low = _number("correction.low", c.low, 0.0)
    _number("correction.high", c.high, low)
    if c.veto is not None:
        _number("correction.veto", c.veto, 0.0, above=True)
    return c
