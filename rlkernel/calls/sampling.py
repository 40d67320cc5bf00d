"""What a backend is asked for ``sampling``, and what it answers."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.types import LogprobKind

FILTER_ORDERS = ("sequential", "joint", "top_k_first")  # rlkernel::FilterOrder
METHODS = ("grouped", "gumbel")
LOGPROBS: tuple[LogprobKind, ...] = ("raw", "tempered", "processed")
RANKINGS = ("tempered", "raw", "processed")
RANK_TIES = ("first", "max", "kept")  # rlkernel::RankTies; the last is "max" of processed ones
GREEDY_LOGPROBS = ("argmax", "softmax")
THRESHOLDS = ("epsilon_cutoff", "eta_cutoff", "top_a")  # columns of what is given for each row
BAND = ("typical_p", "xtc_threshold")
XTC_THRESHOLD = 0.1  # that of llama.cpp and text-generation-webui

# The extension has copies of these, each of its parts as constants; it refuses buffers of other sizes.
SPLIT = 4096  # tokens whose statistics are one record
GROUP = 64  # tokens that one Gumbel variable stands for
MASS_ONE = 2.0**40  # the integer mass of a token as likely as the likeliest
LEAST_EXCLUDED = -27.0  # (z - max) / T below which XTC looks at no token: what it leaves has a mass
RECORD = (  # what is known of a split
    "max_z", "argmax", "sum_z", "weighted", "finite", "mean", "m2", "max_x", "sum_x", "key", "token",
    "token_z", "token_x",
)  # fmt: skip


class Domain:
    """What a random number is for; csrc/include/rlkernel/sampling/stream.h has those of kernels."""

    GROUP = 1  # which group of 64 tokens wins; index: group
    INSIDE = 2  # which of its tokens
    REDRAW = 3  # of a row whose first draw was filtered out
    ACCEPT = 4  # whether a drafted token is accepted
    RESIDUAL = 5  # the token in the place of one that was not
    BONUS = 6  # the seed of the token where a draft of a known distribution is missing
    SPLIT = (7, 8)  # the low and the high word of the seeds of a request's samples; position: sample
    XTC = 9  # whether XTC drops tokens of a row


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

    temperature: float | Tensor = 1.0  # 0: the likeliest token; else a normal number
    top_k: int | Tensor = 0  # off below 1 and from V on
    top_p: float | Tensor = 1.0  # off from 1 on
    min_p: float | Tensor = 0.0  # off from 0 down
    top_n_sigma: float | Tensor = math.inf  # off at infinity
    seeds: Tensor | None = None  # int64; None with token_ids
    positions: Tensor | None = None  # int64; None: 0
    token_ids: Tensor | None = None  # forced, int64
    token_bitmask: Tensor | None = None  # int32 [B, ceil(V / 32)]
    skip: Tensor | None = None  # bool: rows that are neither read nor written
    order: str = FILTER_ORDERS[0]
    gumbel: bool = False  # method
    greedy_softmax: bool = False  # processed log-probabilities of a row with T = 0 are the tempered ones
    raw: bool = False
    entropy: bool = False
    rank: bool = False
    rank_ties: str = RANK_TIES[0]
    support: int = 0  # room for the kept tokens of a row, 0: not wanted
    softmax: bool = False  # row_max and log_sum
    thresholds: Tensor | None = None  # fp32 [B, THRESHOLDS], each off at 0
    band: Tensor | None = None  # fp32 [B, BAND], XTC's where it was drawn, each off at 1

    def may_filter(self, vocab: int) -> bool:
        """Whether any row may be filtered, as far as one can tell without looking at values."""
        k_on = isinstance(self.top_k, Tensor) or 1 <= self.top_k < vocab
        p_on = isinstance(self.top_p, Tensor) or self.top_p < 1
        m_on = isinstance(self.min_p, Tensor) or self.min_p > 0
        greedy = not isinstance(self.temperature, Tensor) and self.temperature == 0
        given = any(x is not None for x in (self.token_bitmask, self.thresholds, self.band))
        return not greedy and (k_on or p_on or m_on or self.may_use_sigma or given)

    @property
    def may_use_sigma(self) -> bool:
        return isinstance(self.top_n_sigma, Tensor) or self.top_n_sigma != math.inf

    @property
    def key(self) -> tuple[Tensor, Tensor]:
        """Of the random stream: seeds and positions."""
        assert self.seeds is not None
        return self.seeds, torch.zeros_like(self.seeds) if self.positions is None else self.positions

    def of_rows(self, a: int, b: int) -> "Sampling":
        return self.each(lambda x: x[a:b])

    def each(self, change: Callable[[Tensor], Tensor]) -> "Sampling":
        """With ``change`` of each tensor."""
        return Sampling._make(change(x) if isinstance(x, Tensor) else x for x in self)


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
    row_max: Tensor | None
    log_sum: Tensor | None

    @classmethod
    def empty(
        cls, rows: int, request: Sampling, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> "SampleStats":
        """For what a kernel writes of logits of ``dtype``, each in memory of its own."""
        wide = dtype if dtype == torch.float64 else torch.float32
        like = torch.empty_like  # half the time of torch.empty
        ids = torch.empty(rows, dtype=torch.int64, device=device)
        number = torch.empty(rows, dtype=wide, device=device)
        room = request.support
        return cls(
            token_ids=ids,
            raw_logprobs=like(number) if request.raw else None,
            tempered_logprobs=number,
            processed_logprobs=like(number),
            kept_mass=like(number),
            kept_count=like(ids),
            entropy=like(number) if request.entropy else None,
            rank=like(ids) if request.rank else None,
            support=torch.empty(rows, room, dtype=torch.int32, device=device) if room else None,
            valid=torch.empty(rows, dtype=torch.bool, device=device),
            row_max=like(number) if request.softmax else None,
            log_sum=like(number) if request.softmax else None,
        )


class Scratch(NamedTuple):
    """What the first pass leaves to the second: a record of each split of a row, and the maxima of its groups
    where a token of it is looked for among them."""

    vocab: int
    records: Tensor  # fp64 [B, splits, RECORD]
    group_max: Tensor | None  # fp32 [B, groups]

    @classmethod
    def of(cls, rows: int, vocab: int, request: Sampling, device: torch.device) -> "Scratch":
        splits, groups = -(-vocab // SPLIT), -(-vocab // GROUP)
        records = torch.empty(rows, splits, len(RECORD), dtype=torch.float64, device=device)
        if request.rank or request.may_filter(vocab):
            return cls(vocab, records, torch.empty(rows, groups, dtype=torch.float32, device=device))
        return cls(vocab, records, None)

    def of_rows(self, a: int, b: int) -> "Scratch":
        maxima = None if self.group_max is None else self.group_max[a:b]
        return Scratch(self.vocab, self.records[a:b], maxima)


class SamplingCall(NamedTuple):
    logits: Tensor  # [B, V]
    adjusted: Tensor | None  # the logits after bias and penalties; None where there are none
    request: Sampling
    wants: tuple[str, ...] = ()  # what a library that draws tokens alone must be able to do

    def scoring(self, token_ids: Tensor) -> "SamplingCall":
        """The same, of given tokens."""
        request = self.request._replace(token_ids=token_ids, seeds=None, positions=None)
        return self._replace(request=request, wants=("token_ids",))
