"""What a backend is asked for ``preference_loss``, and what it answers."""

from typing import NamedTuple

from torch import Tensor


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

# Their order is that of the enums of csrc/include/rlkernel/preference_loss/arguments.h.
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
SORTED = ("aot", "aot_unpaired")  # losses of pairs in the order of their log-ratios
PREFERENCE_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# columns of the sums of a sequence, in the order of csrc/include/rlkernel/preference_loss/arguments.h
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


class PreferenceLossCall(NamedTuple):
    """Checked and normalised; everything is dense, and numbers are of one dtype, fp32 or fp64."""

    logprobs: Tensor  # [2B, L] or [S, L], or packed [N]
    ref_logprobs: Tensor | None  # as logprobs; or [rows]: sums of sequences
    mask: Tensor  # as logprobs, bool
    nll_mask: Tensor | None  # of the likelihood; None: mask
    log_sum_sq_probs: Tensor | None  # as logprobs
    cu_seqlens: Tensor | None  # [rows + 1] int64, of packed sequences
    labels: Tensor | None  # [rows] bool, of an unpaired loss
    kl: Tensor | None  # [1] or [rows]
    items: Tensor | None  # one of fp64: in the place of the rule's, where they are a tensor
    nll_items: Tensor | None
    running_delta: Tensor | None  # [2]
    rule: PreferenceRule


class PreferenceLossResults(NamedTuple):
    """The gradient of a sequence's ``logps`` is its slope."""

    loss: Tensor
    metrics: Tensor
    rewards: Tensor  # [rows]
    logps: Tensor  # [rows]
    running_delta: Tensor | None
    sums: Tensor  # [rows, 7] of fp64, the columns of SEQUENCE_SUMS
    slopes: Tensor  # [rows + 1] of fp64; the last is that of a token of the likelihood
