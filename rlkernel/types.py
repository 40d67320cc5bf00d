"""Results of the public functions, and what ops hand to backends."""

from typing import NamedTuple, Protocol

from torch import Tensor


class ValueLossOutput(NamedTuple):
    """``loss`` [] is differentiable; ``metrics`` [9], of the same pass, are named by ``VALUE_METRICS``."""

    loss: Tensor
    metrics: Tensor


# over the tokens that the mask keeps; variances divide by their number
VALUE_METRICS = (
    "tokens",
    "nonfinite",  # tokens whose loss is NaN or infinite
    "clip_fraction",  # of tokens where the clipped loss is the larger one
    "value_mean",
    "return_mean",
    "return_variance",
    "error_mean",  # of return - value
    "error_variance",
    "explained_variance",  # 1 - error_variance / return_variance, NaN where all returns are equal
)


class Aggregation(NamedTuple):
    """How losses of tokens become one number, normalised: sum of units * factor / num_items.

    A unit is a token, a sequence's ``"sum"`` or its ``"mean"``; num_items counts them, None those of this
    call.  A sequence without a token is none.
    """

    unit: str
    num_items: float | Tensor | None
    factor: float


class PolicyLossOutput(NamedTuple):
    """``loss`` [] is differentiable; ``metrics`` [15], of the same pass, are named by ``POLICY_METRICS``."""

    loss: Tensor
    metrics: Tensor


POLICY_METRICS = (
    "clip_fraction_low",
    "clip_fraction_high",
    "clip_fraction_far",  # dual or delta clip
    "approx_kl_k1",  # mean of old - new
    "approx_kl_k3",  # mean of expm1(new - old) - (new - old)
    "ratio_mean",
    "ratio_max",
    "entropy",
    "kl_to_reference",
    "correction_weight_mean",
    "correction_kept",  # share of the tokens that the correction did not reject
    "tokens",
    "sequences",
    "not_finite",  # tokens whose term is NaN or infinite
    "outside_support",  # tokens with a log-probability of -inf, which add nothing
)

# Their order is that of the enums of csrc/include/rlkernel/policy_loss.h.
POLICY_TERMS = (
    "clipped", "cispo", "reinforce", "sapo", "gmpo", "dppo", "vespo", "surrogate", "dro", "cispo_mask",
)  # fmt: skip
LEVELS = ("token", "sequence", "sequence_token")
SUMS = ("tokens", "sequence_sums", "sequence_means")
KL_ESTIMATORS = ("none", "k1", "abs", "k2", "k3")
# what the KL is multiplied by: the loss's r, the token's own at any level, 1 with the gradient of r, the
# ratio to the rollout
KL_WEIGHTS = ("none", "ratio", "token", "score", "rollout")
DIVERGENCES = ("none", "tv", "kl")  # of the two-sided choice "this token, or another"
CORRECTION_LEVELS = ("absent", "none", "token", "sequence", "geometric")  # "none": only rejection
CORRECTION_MODES = ("truncate", "mask")


class CovariancePick(NamedTuple):
    """Which tokens clip_cov or kl_cov picks: choice and numbers of C++'s PolicySelection, in order."""

    by_hash: bool  # clip_cov
    share: float  # of the tokens
    cov_low: float  # bounds of the covariance of clip_cov's candidates
    cov_high: float
    low: float  # and of their ratio
    high: float
    seed: int  # 32 bits


class PolicyRule(NamedTuple):
    """What a policy loss computes, checked and normalised: the fields of C++'s PolicyLossRule, in order.

    First the choices, then the numbers, infinite where they bound nothing.
    """

    term: int
    level: int
    aggregation: int
    kl: int
    kl_gradient_of_k2: bool
    kl_weight: int
    divergence: int  # of dppo
    correction: int
    verdict: int
    shrink: bool
    normalize: bool  # weights are divided by their mean over the batch
    stale_only: bool  # fresh tokens have the weight 1
    sign_mask: int  # the divergence that a token may have moved from its rollout in the advantage's direction
    two_sided: bool  # or in either
    low: float  # bounds of the ratio; of its logarithm for gmpo; of the divergence for dppo
    high: float
    delta: float
    dual: float
    log_clip: float
    tau_positive: float
    tau_negative: float
    beta: float
    kl_input: float  # bounds of the difference and of the estimate
    kl_output: float
    entropy_coef: float
    k_positive: float  # vespo's exponents and rates
    lambda_positive: float
    k_negative: float
    lambda_negative: float
    coefficient: float  # of kl_cov's penalty, of dro's
    weight_low: float  # of the correction, and their logarithms
    weight_high: float
    log_weight_low: float
    log_weight_high: float
    token_low: float  # bounds of d = log(old / rollout) of a token,
    token_high: float
    extreme_low: float  # of every d of its sequence,
    extreme_high: float
    sum_k1_low: float  # of their sum and mean,
    sum_k1_high: float
    mean_k1_low: float
    mean_k1_high: float
    sum_k2_high: float  # and of the sums and means of d^2 / 2 and exp(d) - 1 - d
    mean_k2_high: float
    sum_k3_high: float
    mean_k3_high: float
    tv_high: float  # of the mean of |exp(d) - 1|, where d has the advantage's sign
    off_policy_high: float  # of the mean of rollout - current, where the advantage is negative
    sign_low: float
    sign_high: float
    max_staleness: float
    log_decay: float  # of the weight, for each version
    denominator: float  # 0: the tokens or sequences that are here
    factor: float


POLICY_CHOICES = PolicyRule._fields.index("low")


class PreferenceLossOutput(NamedTuple):
    """``loss`` [] is differentiable; the others are constants of the same pass.

    ``metrics`` [17] are named by ``PREFERENCE_METRICS``.  ``chosen_rewards`` and ``rejected_rewards`` are
    [B]; of an unpaired loss [S], 0 where the label is the other one.  ``logps`` [2B] or [S] are the sums of
    the policy's log-probabilities (of ``orpo`` and ``simpo`` means).  ``running_delta`` [2] is the new state
    of ``bco_pair``; None where none was given.
    """

    loss: Tensor
    metrics: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    logps: Tensor
    running_delta: Tensor | None


# means over the pairs (unpaired: the sequences of either label) that count; what backends give
PAIR_METRICS = (
    "rewards_chosen",
    "rewards_rejected",
    "rewards_margin",
    "rewards_accuracy",  # share of pairs whose chosen reward is the larger; 0 for an unpaired loss
    "logps_chosen",
    "logps_rejected",
    "preference_loss",  # without the likelihood of the chosen tokens
    "nll_loss",  # of a chosen token, whether or not it is part of the loss
    "log_odds_ratio",  # orpo's logsigmoid(log odds), else 0
    "log_odds_chosen",  # orpo's log odds, else 0
    "weight",  # WPO's weight of a pair, 1 without
    "kl",
    "pairs",  # or sequences
    "tokens_chosen",
    "tokens_rejected",
    "not_finite",  # pairs or sequences whose loss is NaN or infinite
)
PREFERENCE_METRICS = (
    *PAIR_METRICS,
    "outside_support",  # tokens with a log-probability of -inf, which the mask loses
)

# Their order is that of the enums of csrc/include/rlkernel/preference_loss.h.
PREFERENCE_TERMS = (
    "sft",
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "orpo",
    "simpo",
    "kto",
    "apo_zero_unpaired",
    "ipo_sum",
)
PREFERENCE_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# columns of the sums of a sequence, in the order of csrc/include/rlkernel/preference_loss.h
SEQUENCE_SUMS = (
    "logps",
    "ref_logps",
    "tokens",
    "nll",  # sum of the log-probabilities that the likelihood term counts
    "nll_tokens",
    "aligned",  # sum of logprobs - log_sum_sq_probs
    "cutoff",  # tokens before this one belong to the shared length of LD-DPO
)


class PreferenceRule(NamedTuple):
    """What a preference loss computes, checked and normalised."""

    terms: tuple[int, ...]
    weights: tuple[float, ...]  # of the terms
    smoothing: tuple[float, ...]  # of the terms
    paired: bool
    per_token: bool  # rewards and logps are means over tokens, not sums
    divergence: int
    weighting: bool
    beta: float
    gamma: float
    discopop_tau: float
    exponent: float  # alpha - 1 of the alpha divergence
    ld_alpha: float  # 1: not used
    nll_coef: float
    desirable_weight: float
    undesirable_weight: float
    factor: float  # times this: data-parallel size
    items: float  # pairs or sequences of the whole batch; 0: those that are here
    nll_items: float  # what the mean of the likelihood divides by, of the whole batch; 0: the tokens here


class Forest(Protocol):
    """Segments of rows, one behind the other: how long each is, and below which one it stands (-1: none).

    A row sees the rows of its segment up to itself and all rows of the segments above.
    """

    @property
    def lengths(self) -> tuple[int, ...]: ...

    @property
    def parents(self) -> tuple[int, ...]: ...


class AttentionRule(NamedTuple):
    """What an attention score goes through, checked and normalised."""

    scale: float  # s = scale * q . k
    softcap: float  # then softcap * tanh(s / softcap); 0: not
    window: int  # keys at most this many positions back, the row itself included; 0: all
    bitwise: bool  # the bits of the same backend on the repeated prompts
