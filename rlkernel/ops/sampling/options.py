"""The options of ``sample`` as type checkers read them where another function takes them by ``**options``.

Their defaults, and what they mean, are in the signature of ``sample``; a test holds the two together.
"""

from typing import Any, TypedDict

from torch import Tensor

from rlkernel.calls.sampling import SampleOutput
from rlkernel.ops.sampling.penalties import Penalties
from rlkernel.ops.sampling.token_bias import LogitBias
from rlkernel.types import FilterOrder, GreedyLogprobs, LogprobKind, RankTies, SamplingMethod


class _Distribution(TypedDict, total=False):
    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    top_n_sigma: float | Tensor | None
    epsilon_cutoff: float | Tensor | None
    eta_cutoff: float | Tensor | None
    top_a: float | Tensor | None
    typical_p: float | Tensor | None
    xtc_probability: float | Tensor | None
    xtc_threshold: float | Tensor
    seeds: int | Tensor | None
    positions: int | Tensor | None
    token_bitmask: Tensor | None
    logit_bias: LogitBias | None
    penalties: Penalties | None
    filter_order: FilterOrder
    return_logprobs: tuple[LogprobKind, ...]


class ChainOptions(_Distribution, total=False):
    """Those of ``verify_chain``: of a draw, without what else ``sample`` returns."""

    method: SamplingMethod


class ScoreOptions(_Distribution, total=False):
    """Those of ``score_tokens``, which draws nothing."""

    greedy_logprobs: GreedyLogprobs
    return_entropy: bool
    return_rank: bool
    top_logprobs: int
    logprob_token_ids: Tensor | None
    ranking: LogprobKind
    rank_ties: RankTies
    return_support: int
    out: SampleOutput | None
    group: Any
    vocab_start: int | None


class SampleOptions(ChainOptions, ScoreOptions, total=False):
    """All of them."""
