"""What a backend is asked for ``policy_loss``, and what it answers."""

from typing import NamedTuple

from torch import Tensor


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

# Their order is that of the enums of csrc/include/rlkernel/policy_loss/arguments.h.
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


class PolicyLossCall(NamedTuple):
    """Checked and normalised; everything is dense, and numbers are of one dtype, fp32 or fp64."""

    logprobs: Tensor  # [B, L], or packed [N]
    entropy: Tensor | None  # as logprobs
    old_logprobs: Tensor | None  # as logprobs; None: they are the logprobs
    advantages: Tensor  # as logprobs, or [sequences]
    mask: Tensor  # as logprobs, bool
    cu_seqlens: Tensor | None  # [sequences + 1] int64, of packed ones
    ref_logprobs: Tensor | None  # as logprobs
    rollout_logprobs: Tensor | None  # as logprobs
    staleness: Tensor | None  # as logprobs, or [sequences]
    token_counts: Tensor | None  # [sequences]
    selected: Tensor | None  # as logprobs, bool: the tokens that clip_cov or kl_cov picked
    rule: PolicyRule
    entropy_gradient: bool


class PolicyLossResults(NamedTuple):
    """The gradients are those of the tensors here times ``scale``, which is known when all is summed."""

    loss: Tensor
    metrics: Tensor
    scale: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None  # None unless asked for


class PolicySelectCall(NamedTuple):
    """Which tokens clip_cov or kl_cov picks; the tensors are those of a ``PolicyLossCall``."""

    logprobs: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor  # for a backend without the tokens outside of their support
    cu_seqlens: Tensor | None
    pick: CovariancePick


class PolicySelectResults(NamedTuple):
    selected: Tensor  # as the mask
