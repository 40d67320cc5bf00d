"""What a backend is asked for ``sampling``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

FILTER_ORDERS = ("sequential", "joint", "top_k_first")  # rlkernel::FilterOrder


class SampleOutput(NamedTuple):
    """What ``sample`` draws for each row, and what is known of it; None where it was not asked for.

    ``raw_logprobs``, ``tempered_logprobs`` and ``processed_logprobs`` are the token's log-probability under
    ``softmax(logits)``, under the distribution after bias, penalties, bitmask and temperature, and under that
    one restricted to the kept tokens.  ``kept_mass`` and ``kept_count`` are the probability (under the
    tempered distribution) and the number of the kept tokens, None from a library that gives the token alone;
    ``entropy`` is the tempered distribution's.  ``rank`` is the token's place, from 1, ``top_ids`` and
    ``top_logprobs`` [B, K] are the likeliest tokens and ``id_logprobs`` [B, K] belong to given ones, all in
    the distribution that ``ranking`` names.

    ``support_ids[support_offsets[b] : support_offsets[b + 1]]`` are the kept tokens of row b, ascending; none
    for a row whose distribution is whole, or too large for the buffer (``support_overflow``).  ``valid`` is
    False for a row that holds NaN or +inf or no finite logit; its token is -1.
    """

    token_ids: Tensor
    raw_logprobs: Tensor | None
    tempered_logprobs: Tensor | None
    processed_logprobs: Tensor | None
    kept_mass: Tensor | None
    kept_count: Tensor | None
    entropy: Tensor | None
    rank: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    id_logprobs: Tensor | None
    support_ids: Tensor | None
    support_offsets: Tensor | None
    support_overflow: Tensor | None
    valid: Tensor


class VerifyOutput(NamedTuple):
    """What ``verify_chain`` makes of K drafted tokens: [B, K + 1], but ``accepted`` [B].

    Row b has ``accepted[b]`` drafts and behind them one token of the target; the rest is padding: token -1,
    log-probabilities 0, not ``valid``.  The log-probabilities are those of ``SampleOutput``, of the target;
    None where they were not asked for.
    """

    token_ids: Tensor
    accepted: Tensor
    raw_logprobs: Tensor | None
    tempered_logprobs: Tensor | None
    processed_logprobs: Tensor | None
    valid: Tensor


class Sampling(NamedTuple):
    """What a sampling kernel is asked for, checked and normalised; per-row values are [B] or one number."""

    temperature: float | Tensor  # 0: the likeliest token; else a normal number
    top_k: int | Tensor  # off below 1 and from V on
    top_p: float | Tensor  # off from 1 on
    min_p: float | Tensor  # off from 0 down
    top_n_sigma: float | Tensor  # off at infinity
    seeds: Tensor | None  # int64; None with token_ids
    positions: Tensor | None  # int64; None: 0
    token_ids: Tensor | None  # forced, int64
    token_bitmask: Tensor | None  # int32 [B, ceil(V / 32)]
    skip: Tensor | None  # bool: rows that are neither read nor written
    order: str  # one of FILTER_ORDERS
    gumbel: bool  # method
    raw: bool
    entropy: bool
    rank: bool
    support: int  # room for the kept tokens of a row, 0: not wanted
    thresholds: Tensor | None = None  # fp32 [B, 3]: epsilon_cutoff, eta_cutoff and top_a, each off at 0
    band: Tensor | None = None  # fp32 [B, 2]: typical_p and XTC's threshold where it was drawn, each off at 1

    def may_filter(self, vocab: int) -> bool:
        """Whether any row may be filtered, as far as one can tell without looking at values."""
        k_on = isinstance(self.top_k, Tensor) or 1 <= self.top_k < vocab
        p_on = isinstance(self.top_p, Tensor) or self.top_p < 1
        m_on = isinstance(self.min_p, Tensor) or self.min_p > 0
        greedy = not isinstance(self.temperature, Tensor) and self.temperature == 0
        tensors = (self.token_bitmask, self.thresholds, self.band)
        given = any(x is not None for x in tensors)
        return not greedy and (k_on or p_on or m_on or self.may_use_sigma or given)

    @property
    def may_use_sigma(self) -> bool:
        return isinstance(self.top_n_sigma, Tensor) or self.top_n_sigma != float("inf")


class SampleStats(NamedTuple):
    """What backends return for ``Sampling``: [B] each, ``support`` [B, K] padded with -1, None unless wanted.

    ``row_max`` and ``log_sum`` of the tempered distribution: ``lse = row_max / T + log_sum``.
    """

    token_ids: Tensor
    raw_logprobs: Tensor | None
    tempered_logprobs: Tensor
    processed_logprobs: Tensor
    kept_mass: Tensor
    kept_count: Tensor
    entropy: Tensor | None
    rank: Tensor | None
    support: Tensor | None
    valid: Tensor
    row_max: Tensor
    log_sum: Tensor


class SamplingCall(NamedTuple):
    logits: Tensor  # [B, V]
    adjusted: Tensor | None  # the logits after bias and penalties; None where there are none
    request: Sampling
    wants: tuple[str, ...]  # what a library that draws tokens alone must be able to do
