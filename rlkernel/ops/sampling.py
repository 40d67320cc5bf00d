"""Tokens drawn from logits, with their log-probabilities and the set that the filters kept, in one call."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.sampling import SampleOutput, SampleStats, Sampling, SamplingCall
from rlkernel.opaque import Op
from rlkernel.ops import _sampling_inputs as inputs
from rlkernel.ops._penalties import Penalties
from rlkernel.ops._sampling_ranks import Wanted, ranked
from rlkernel.ops._token_bias import LogitBias


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
    xtc_threshold: float | Tensor = inputs.XTC_THRESHOLD,
    seeds: int | Tensor | None = None,
    positions: int | Tensor | None = None,
    token_bitmask: Tensor | None = None,
    logit_bias: LogitBias | None = None,
    penalties: Penalties | None = None,
    filter_order: str = "sequential",
    method: str = "grouped",
    return_logprobs: tuple[str, ...] = inputs.LOGPROBS,
    return_entropy: bool = False,
    return_rank: bool = False,
    top_logprobs: int = 0,
    logprob_token_ids: Tensor | None = None,
    ranking: str = "tempered",
    return_support: int = 0,
    out: SampleOutput | None = None,
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
            few tokens a row; added first.
        penalties: ``Penalties``, applied after the bias: repetition, DRY, repeated n-grams, bad words.
        filter_order: of what top_p takes its share.  "sequential": of what the other filters keep (vLLM);
            "top_k_first": of what top_k keeps, the others cut after it (HF ``generate``, SGLang with min_p);
            "joint": of the whole distribution (FlashInfer's joint, AITER).
        method: "grouped": one Gumbel variable for each 64 tokens and an exact draw inside the best group;
            "gumbel": one for each token, the stream of vLLM's model runner.
        return_logprobs: which of the three to return.
        return_entropy: also the entropy of ``softmax(z / T)``.
        return_rank: also the token's place in the order, from 1.
        top_logprobs: how many of the likeliest tokens to return, with their log-probabilities.
        logprob_token_ids: integers [K] or [..., K], tokens whose log-probabilities to return; -1 is padding.
        ranking: whose order the rank and the likeliest tokens are of, and whose log-probabilities theirs and
            those of ``logprob_token_ids`` are: "tempered", "raw" (vLLM's default) or "processed".
        return_support: room for the kept tokens of a row; 0 does not return them.
        out: a SampleOutput of an earlier call, whose tensors receive the results.

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
    """
    shape, flat = inputs.rows_of(logits)
    request = inputs.sampling(
        shape, flat.shape[1], flat.dtype, flat.device, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, top_n_sigma=top_n_sigma, seeds=seeds, positions=positions, token_ids=None,
        token_bitmask=token_bitmask, filter_order=filter_order, method=method,
        return_logprobs=return_logprobs, return_entropy=return_entropy, return_rank=return_rank,
        return_support=return_support, epsilon_cutoff=epsilon_cutoff, eta_cutoff=eta_cutoff, top_a=top_a,
        typical_p=typical_p, xtc_probability=xtc_probability, xtc_threshold=xtc_threshold,
    )  # fmt: skip
    needs = {"seeds"} if seeds is not None else set()
    z = inputs.adjusted(flat, shape, logit_bias, penalties)
    wanted = inputs.wanted(ranking, top_logprobs, logprob_token_ids, shape, flat.shape[1], flat.device)
    return _sampled(shape, flat, z, request, needs, return_logprobs, wanted, out)


def score_tokens(
    logits: Tensor,
    token_ids: Tensor,
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
    xtc_threshold: float | Tensor = inputs.XTC_THRESHOLD,
    seeds: int | Tensor | None = None,
    positions: int | Tensor | None = None,
    token_bitmask: Tensor | None = None,
    logit_bias: LogitBias | None = None,
    penalties: Penalties | None = None,
    filter_order: str = "sequential",
    return_logprobs: tuple[str, ...] = inputs.LOGPROBS,
    return_entropy: bool = False,
    return_rank: bool = False,
    top_logprobs: int = 0,
    logprob_token_ids: Tensor | None = None,
    ranking: str = "tempered",
    return_support: int = 0,
    out: SampleOutput | None = None,
) -> SampleOutput:
    """What ``sample`` returns of its token, of given ones: prompt log-probabilities, replay of a rollout.

    Equal to ``sample`` where it had drawn ``token_ids`` [...], bit for bit.  A token that the filters leave
    out has ``processed = -inf``, in a row with T = 0 every token but the likeliest.  ``seeds`` and
    ``positions`` say in which rows ``xtc_probability`` drops tokens, and nothing else.

    Raises:
        ValueError: as ``sample``; a token id is outside [0, V); ``xtc_probability`` without ``seeds``.
    """
    shape, flat = inputs.rows_of(logits)
    token_ids = inputs.forced(token_ids, shape, flat.shape[1], flat.device)
    request = inputs.sampling(
        shape, flat.shape[1], flat.dtype, flat.device, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, top_n_sigma=top_n_sigma, seeds=seeds, positions=positions, token_ids=token_ids,
        token_bitmask=token_bitmask, filter_order=filter_order, method="grouped",
        return_logprobs=return_logprobs, return_entropy=return_entropy, return_rank=return_rank,
        return_support=return_support, epsilon_cutoff=epsilon_cutoff, eta_cutoff=eta_cutoff, top_a=top_a,
        typical_p=typical_p, xtc_probability=xtc_probability, xtc_threshold=xtc_threshold,
    )  # fmt: skip
    z = inputs.adjusted(flat, shape, logit_bias, penalties)
    wanted = inputs.wanted(ranking, top_logprobs, logprob_token_ids, shape, flat.shape[1], flat.device)
    return _sampled(shape, flat, z, request, {"token_ids"}, return_logprobs, wanted, out)


def _sampled(
    shape: torch.Size,
    logits: Tensor,
    adjusted: Tensor | None,
    request: Sampling,
    needs: set[str],
    return_logprobs: tuple[str, ...],
    wanted: Wanted,
    out: SampleOutput | None,
) -> SampleOutput:
    outputs = {"logprobs": return_logprobs, "entropy": request.entropy, "rank": request.rank,
               "support": request.support, "top_logprobs": wanted.top,
               "logprob_token_ids": wanted.token_ids is not None}  # fmt: skip
    needs |= {name for name, want in outputs.items() if want}
    stats = draw(logits, adjusted, request, frozenset(needs))
    return assemble(shape, logits, adjusted, request, stats, return_logprobs, wanted, out)


def assemble(
    shape: torch.Size,
    logits: Tensor,
    adjusted: Tensor | None,
    request: Sampling,
    stats: SampleStats,
    return_logprobs: tuple[str, ...],
    wanted: Wanted,
    out: SampleOutput | None,
) -> SampleOutput:
    """What the caller sees of ``stats``; values of the logits are looked up only where ``ranked`` must."""
    vocab = logits.shape[1]
    also = ranked(draw, logits, adjusted, request, stats, wanted)
    ids = offsets = overflow = None
    if stats.support is not None:
        ids, offsets, overflow = compact(stats, request, vocab)

    def rows(x: Tensor | None, *more: int) -> Any:
        return x if x is None or len(shape) == 1 else x.reshape((*shape, *more))

    made = SampleOutput(
        token_ids=rows(stats.token_ids),
        raw_logprobs=rows(stats.raw_logprobs),
        tempered_logprobs=rows(stats.tempered_logprobs) if "tempered" in return_logprobs else None,
        processed_logprobs=rows(stats.processed_logprobs) if "processed" in return_logprobs else None,
        kept_mass=rows(stats.kept_mass),
        kept_count=rows(stats.kept_count),
        entropy=rows(stats.entropy),
        rank=rows(also.rank),
        top_ids=rows(also.top_ids, wanted.top),
        top_logprobs=rows(also.top_logprobs, wanted.top),
        id_logprobs=None if wanted.token_ids is None else rows(also.id_logprobs, wanted.token_ids.shape[1]),
        support_ids=ids,
        support_offsets=offsets,
        support_overflow=rows(overflow),
        valid=rows(stats.valid),
    )
    return made if out is None else _written(out, made)


def _written(out: SampleOutput, made: SampleOutput) -> SampleOutput:
    """``out`` with the results in its tensors; nothing is written when one does not fit."""
    for name, mine, theirs in zip(made._fields, made, out, strict=True):
        if mine is None:
            continue
        want = f"{str(mine.dtype).removeprefix('torch.')} {tuple(mine.shape)}"
        if theirs is None or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            got = "None"
            if theirs is not None:
                got = f"{str(theirs.dtype).removeprefix('torch.')} {tuple(theirs.shape)}"
            raise ValueError(f"out.{name} must be {want}, got {got}")
    for mine, theirs in zip(made, out, strict=True):
        if mine is not None and theirs is not None:
            theirs.copy_(mine)
    return out


def compact(stats: SampleStats, request: Sampling, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """``support_ids`` [B * K] with the rows' kept ids one after another and -1 behind the last,
    ``support_offsets`` [B + 1] and ``support_overflow`` [B]."""
    table = stats.support
    assert table is not None
    rows, room = table.shape
    counts = (table >= 0).sum(-1)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = offsets[:-1, None] + torch.arange(room, device=table.device)
    ids = torch.full((rows * room + 1,), -1, dtype=torch.int32, device=table.device)
    # what is padding goes to a last element that is cut off
    ids.scatter_(0, torch.where(table >= 0, place, rows * room).flatten(), table.flatten())
    return ids[:-1], offsets, _is_filtered(stats, request, vocab) & (stats.kept_count > room)


def _is_filtered(stats: SampleStats, request: Sampling, vocab: int) -> Tensor:
    """Rows whose distribution is not the whole one: a filter is on and does not keep the vocabulary."""
    k = request.top_k
    in_range = (k >= 1) & (k < vocab)
    on = in_range | (request.top_p < 1) | (request.min_p > 0) | (request.top_n_sigma < torch.inf)
    on = on | (request.token_bitmask is not None)
    if request.thresholds is not None:
        on = on | (request.thresholds > 0).any(-1)
    if request.band is not None:
        on = on | (request.band < 1).any(-1)
    return stats.valid & (request.temperature != 0) & on & (stats.kept_count < vocab)


def draw(
    logits: Tensor, adjusted: Tensor | None, request: Sampling, needs: frozenset[str] = frozenset()
) -> SampleStats:
    """What the backend that can do what is in ``needs`` makes of the logits."""
    if torch.compiler.is_compiling():
        needs |= {"every statistic"}  # the outputs of a node do not depend on the backend
    with torch.no_grad():
        return SampleStats(*op(SamplingCall(logits, adjusted, request, tuple(sorted(needs)))))


def _pick(call: SamplingCall) -> ModuleType:
    return dispatch.pick("sampling", call.logits, sampling=call.request, needs=frozenset(call.wants))


def _like(call: SamplingCall) -> SampleStats:
    logits = call.logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    return SampleStats.empty(logits.shape[0], call.request, logits.device, wide)


def _forward(impl: ModuleType, call: SamplingCall) -> SampleStats:
    return impl.forward(call)


op = Op("sampling", SamplingCall, SampleStats, outputs=12, pick=_pick, forward=_forward, like=_like)
