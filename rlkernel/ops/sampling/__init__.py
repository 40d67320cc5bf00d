"""Tokens drawn from logits, with their log-probabilities and the set that the filters kept, in one call."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import Unpack

from rlkernel.calls.sampling import LOGPROBS, XTC_THRESHOLD, SampleOutput, SamplingCall
from rlkernel.ops import _vocab_parallel
from rlkernel.ops.sampling import inputs, sharded
from rlkernel.ops.sampling.drawing import draw
from rlkernel.ops.sampling.options import ScoreOptions
from rlkernel.ops.sampling.outputs import output
from rlkernel.ops.sampling.penalties import Penalties
from rlkernel.ops.sampling.token_bias import LogitBias
from rlkernel.types import FilterOrder, GreedyLogprobs, LogprobKind, RankTies, SamplingMethod

F = TypeVar("F", bound=Callable[..., Any])


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    top_n_sigma: float | Tensor | None = None,
    epsilon_cutoff: float | Tensor | None = None,
    eta_cutoff: float | Tensor | None = None,
    top_a: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    xtc_probability: float | Tensor | None = None,
    xtc_threshold: float | Tensor = XTC_THRESHOLD,
    seeds: int | Tensor | None = None,
    positions: int | Tensor | None = None,
    token_bitmask: Tensor | None = None,
    logit_bias: LogitBias | None = None,
    penalties: Penalties | None = None,
    filter_order: FilterOrder = "sequential",
    method: SamplingMethod = "grouped",
    return_logprobs: tuple[LogprobKind, ...] = LOGPROBS,
    greedy_logprobs: GreedyLogprobs = "argmax",
    return_entropy: bool = False,
    return_rank: bool = False,
    top_logprobs: int = 0,
    logprob_token_ids: Tensor | None = None,
    ranking: LogprobKind = "tempered",
    rank_ties: RankTies = "first",
    return_support: int = 0,
    out: SampleOutput | None = None,
    group: Any = None,
    vocab_start: int | None = None,
) -> SampleOutput:
    """Draw a token of each row, with its log-probability under three distributions, in one pass.

    Equal to, with ``z`` the logits after ``logit_bias``, ``penalties`` and ``token_bitmask``,

        raw       = log_softmax(logits)                    at the token
        tempered  = log_softmax(z / T)                     at the token
        processed = log_softmax(z / T, -inf outside kept)  at the token, which is drawn from this distribution

    Each of these keeps the first tokens in the order (z descending, id ascending): ``top_k`` the first k;
    ``min_p`` those with at least ``min_p`` times the largest probability; ``top_n_sigma`` those with
    ``z >= max z - n * std(z)``; ``epsilon_cutoff`` = e those with a probability of at least e, ``eta_cutoff``
    of at least min(e, sqrt(e) * exp(-entropy)) and ``top_a`` of at least a times the largest squared, but
    always the likeliest; ``top_p`` a token while those before it have less than ``top_p`` of the mass.
    Of what these leave, normalised to p', ``typical_p`` keeps a token while those whose surprise -log p' is
    nearer to the entropy of p' have less than ``typical_p`` of the mass.  Of what is left then, normalised to
    p'', XTC drops those likelier than the least likely one with p'' >= ``xtc_threshold``, in a row in which a
    uniform number of (seed, position) is less than ``xtc_probability``.
    A row with T = 0 takes the likeliest token (lowest id), is not filtered, and has ``processed = 0`` and the
    other two at T = 1.

    The draw is a function of (row, seed, position): the same alone, in any batch and in any order (batch-
    invariant), and the same call gives the same bits (run-to-run).  Masses are summed as integers, so that
    the kept set does not depend on any order of summation either.

    Args:
        logits: [..., V] fp16, bf16, fp32 or fp64; not modified.
        temperature: 0 or a normal number > 0; one, or one per row [...], as all parameters below may be.
            They are rounded to fp32 (that of fp64 logits to fp64) and checked then.
        top_k: >= 1; 0, -1 or None keep all.
        top_p: in (0, 1]; 1 or None keep all.
        min_p: in [0, 1]; 0 or None keep all.
        top_n_sigma: > 0; infinity or None keep all.
        epsilon_cutoff, eta_cutoff, top_a: in [0, 1]; 0 or None keep all.
        typical_p: in (0, 1]; 1 or None keep all.
        xtc_probability: in [0, 1]; 0 or None keep all.
        xtc_threshold: in (0, 1]; above 0.5 no two tokens reach it, and all are kept.
        seeds: 64-bit integers, signed or not; None draws them from torch's generator.
        positions: the token's place in its sequence, 64-bit integers; None means 0.
        token_bitmask: int32 [..., ceil(V / 32)]; token i is allowed where bit i % 32 of word i // 32 is set.
            Words behind V do not count; tokens behind a narrower mask are not allowed.
        logit_bias: [V], [..., V], {token: bias}, one such dict (or None) for each row, or a ``TokenBias`` of
            few tokens a row; added first.  No gradient.
        penalties: ``Penalties``, applied after the bias: repetition, DRY, repeated n-grams, bad words.
        filter_order: of what top_p takes its share.  "sequential": of what the other filters keep (vLLM);
            "top_k_first": of what top_k keeps, the others cut after it (HF ``generate``, SGLang with min_p);
            "joint": of the whole distribution (FlashInfer's joint, AITER).
        method: "grouped": one Gumbel variable for each 64 tokens and an exact draw inside the best group;
            "gumbel": one for each token, the stream of vLLM's model runner.
        return_logprobs: which of the three to return.
        greedy_logprobs: of what a row with T = 0 has its processed log-probabilities.  "argmax": of the token
            that it takes, which has 0; "softmax": of the distribution before one is taken (vLLM's).  In both
            the token alone is kept; its processed rank by ``rank_ties="max"`` is of that distribution too.
        return_entropy: also the entropy of ``softmax(z / T)``.
        return_rank: also the token's place in the order, from 1.
        top_logprobs: how many of the likeliest tokens to return, with their log-probabilities.
        logprob_token_ids: integers [K] or [..., K], tokens whose log-probabilities to return; -1 is padding.
        ranking: whose order the rank and the likeliest tokens are of, and whose log-probabilities theirs and
            those of ``logprob_token_ids`` are: "tempered", "raw" (vLLM's default) or "processed".
        rank_ties: which rank tokens have that are as likely.  "first": each its own, lower ids first; "max":
            all that of the last one (vLLM's), where ``ranking="processed"`` of the last one that is kept.
        return_support: room for the kept tokens of a row; 0 does not return them.
        out: a SampleOutput of an earlier call, whose tensors receive the results.
        group: a ``torch.distributed`` process group whose ranks have the same rows and each some entries of
            the vocabulary, as many as it likes.  All else that is given is the same on every rank, and ids,
            masks and biases are of the whole vocabulary; ``seeds=None`` are the first rank's.
        vocab_start: with ``group``, the first entry of this rank.  A DTensor of logits that is split over its
            last dimension needs neither.

    With a group every rank gets the outputs of the whole rows, with the bits that they have on one rank.
    Rows that nobody filters exchange what each 4096 tokens are summed up to; others are dealt out to the
    ranks, each of which takes some of them whole.  No rank ever holds all logits.

    Returns:
        SampleOutput of [...] tensors in nats, fp32 (fp64 for fp64 logits); constants without a gradient.  A
        row that holds NaN or +inf, or no finite logit, is not ``valid``: token -1, NaN, counts 0.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  Values of tensors are
            checked on a CPU, and on a GPU only in debug mode (``RLKERNEL_DEBUG=1``), because that
            synchronises; without it, a row of such a value is not ``valid``.

    The grouped draw rests on the max-stability of Gumbel variables, as FlashSampling (arXiv 2603.15854);
    top-p follows Holtzman et al. (arXiv 1904.09751), min-p Nguyen et al. (arXiv 2407.01082), top-n-sigma
    arXiv 2411.07641, epsilon and eta Hewitt et al. (arXiv 2210.15191), typical-p Meister et al. (arXiv
    2202.00666); XTC is text-generation-webui's and llama.cpp's.

    Examples:
        >>> logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]])
        >>> out = rlkernel.sample(logits, top_k=2, seeds=7, return_support=4)
        >>> out.support_ids, bool(torch.isin(out.token_ids, out.support_ids))
        (tensor([ 1,  2, -1, -1], dtype=torch.int32), True)
    """
    options = dict(locals())  # all that was given, by name
    return _sampled(options.pop("logits"), options)


def _sampled(logits: Tensor, options: dict[str, Any], token_ids: Tensor | None = None) -> SampleOutput:
    logits, group, start = _vocab_parallel.local_logits(logits, options["group"], options["vocab_start"])
    group, start = _vocab_parallel.named(group, start)
    rows, logits = inputs.rows_of(logits, group is not None)
    if group is not None:
        return sharded.sampled(sharded.Source.of(logits, start), group, start, rows, options, token_ids)
    if token_ids is not None:
        token_ids = inputs.forced(token_ids, rows)
    request, wanted, wants = inputs.asked(rows, options, token_ids)
    z = inputs.adjusted(logits, rows, options["logit_bias"], options["penalties"])
    call = SamplingCall(logits, z, request, wants)
    return output(rows.shape, call, draw(call), wanted, options)


_OPTIONS = [p for p in inspect.signature(sample).parameters.values() if p.kind is p.KEYWORD_ONLY]
_DEFAULTS = {p.name: p.default for p in _OPTIONS}
_known: dict[str, frozenset[str]] = {}  # of each function that takes them


def takes_options_of_sample(kind: type) -> Callable[[F], F]:
    """The signature of the function tells what its ``**options`` are: those of ``kind``, with defaults."""

    def told(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [p for p in _OPTIONS if p.name in kind.__annotations__]
        _known[function.__name__] = frozenset(p.name for p in options)
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return told


def options_of_sample(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``sample``, of those that the function of this name was given."""
    if unknown := given.keys() - _known[name]:
        raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
    return {**_DEFAULTS, **given}


@takes_options_of_sample(ScoreOptions)
def score_tokens(logits: Tensor, token_ids: Tensor, **options: Unpack[ScoreOptions]) -> SampleOutput:
    """What ``sample`` returns of its token, of given ones: prompt log-probabilities, replay of a rollout.

    Equal to ``sample`` where it had drawn ``token_ids`` [...], bit for bit.  A token that the filters leave
    out has ``processed = -inf``, in a row with T = 0 every token but the likeliest.  ``options`` are those of
    ``sample`` but ``method``; ``seeds`` and ``positions`` say in which rows ``xtc_probability`` drops tokens,
    and nothing else.

    Raises:
        ValueError: as ``sample``; a token id is outside [0, V); ``xtc_probability`` without ``seeds``.

    Examples:
        >>> logits = torch.randn(2, 8)
        >>> out = rlkernel.sample(logits, top_p=0.9, seeds=7)
        >>> scored = rlkernel.score_tokens(logits, out.token_ids, top_p=0.9)
        >>> torch.equal(scored.processed_logprobs, out.processed_logprobs)
        True
    """
    return _sampled(logits, options_of_sample("score_tokens", options), token_ids)
