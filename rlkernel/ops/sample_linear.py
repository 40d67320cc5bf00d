"""Tokens drawn from hidden states and the lm_head, without the logits in memory where nobody filters."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sampling import SampleOutput, Sampling
from rlkernel.drivers.sample_linear import stored_dtype
from rlkernel.ops import _sampling_inputs as inputs
from rlkernel.ops import sampling as op
from rlkernel.ops._penalties import Penalties
from rlkernel.ops._token_bias import LogitBias
from rlkernel.ops.linear_logprob import checked_head
from rlkernel.runtime.modes import without_autocast


def sample_linear(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    store_logits: bool | str = "auto",
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
    """Draw a token of each row of hidden states, with ``sample``'s statistics behind each tile of logits.

    Equal to ``sample(logits, ...)`` of ``logits = softcap * tanh(u / softcap)`` (``u`` without a softcap)
    with ``u = (hidden @ weight.T + bias) * logit_scale``, as ``linear_logprob`` has them: the product rounded
    to ``logits_dtype``, all that follows in fp32.  Bit for bit, of the logits that the product gives.

    The product is computed in tiles of the vocabulary, whose width follows from V, H, dtypes and the limit of
    the workspace.  What a tile says of its rows is kept, the tile is not: logits [N, V] are in memory only
    where they must be read again, because a row may be filtered, or for ``return_rank``, ``top_logprobs``,
    ``logprob_token_ids``, ``logit_bias`` or ``penalties``.  A number that filters nothing (``top_p=1.0``)
    stores nothing; a tensor of them does, whatever it holds, since looking at it would synchronise.

    The tiles change no bit of a row's statistics, nor do the other rows; the product is a library's, whose
    algorithm may depend on the number of rows.

    Args:
        hidden: [..., H] fp16, bf16, fp32 or fp64.
        weight: [V, H] in one of these dtypes.
        bias: [V] or None.
        logit_scale, softcap: as in ``linear_logprob``.
        logits_dtype: the dtype to which the product is rounded; None means fp32, which rounds nothing.
        store_logits: "auto", as said above; True: always; False: never, an error where they must be.
        temperature and all that follows: as in ``sample``.

    Returns:
        SampleOutput of [...] tensors, as ``sample``; constants without a gradient.

    Raises:
        ValueError: as ``sample`` and ``linear_logprob``; ``store_logits`` is False and logits are needed.

    Follows FlashSampling (arXiv 2603.15854), which has neither filters nor log-probabilities.
    """
    no_ids = hidden.new_zeros(hidden.shape[:-1], dtype=torch.int64) if isinstance(hidden, Tensor) else hidden
    rounded = torch.float32 if logits_dtype is None else logits_dtype
    _, head = checked_head(hidden, weight, no_ids, bias, 1.0, logit_scale, softcap, -100, rounded)
    shape, vocab = hidden.shape[:-1], weight.shape[0]
    flat = hidden.detach().reshape(math.prod(shape), hidden.shape[-1])
    request = inputs.sampling(
        shape, vocab, head.compute_dtype, flat.device, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, top_n_sigma=top_n_sigma, seeds=seeds, positions=positions, token_ids=None,
        token_bitmask=token_bitmask, filter_order=filter_order, method=method,
        return_logprobs=return_logprobs, return_entropy=return_entropy, return_rank=return_rank,
        return_support=return_support, epsilon_cutoff=epsilon_cutoff, eta_cutoff=eta_cutoff, top_a=top_a,
        typical_p=typical_p, xtc_probability=xtc_probability, xtc_threshold=xtc_threshold,
    )  # fmt: skip
    wanted = inputs.wanted(ranking, top_logprobs, logprob_token_ids, shape, vocab, flat.device)
    reasons = {
        "a filter": request.may_filter(vocab), "return_rank": request.rank, "top_logprobs": top_logprobs,
        "logprob_token_ids": logprob_token_ids is not None,
        "logit_bias": logit_bias is not None, "penalties": penalties is not None,
    }  # fmt: skip
    store = _store(store_logits, [name for name, needed in reasons.items() if needed])
    weight, head = weight.detach(), head._replace(bias=None if bias is None else bias.detach())
    run = _compiled if torch.compiler.is_compiling() else _forward
    if logit_bias is None and penalties is None:
        stats, logits = run(flat, weight, head, request, store)
        adjusted = None
    else:
        _, logits = run(flat, weight, head, None, True)
        adjusted = inputs.adjusted(logits, shape, logit_bias, penalties)
        draw = op._compiled if torch.compiler.is_compiling() else op._forward
        stats = draw(logits, adjusted, request, frozenset({"every statistic"}))
    return op.assemble(shape, logits, adjusted, request, stats, return_logprobs, wanted, out)


def _store(store_logits: bool | str, reasons: list[str]) -> bool:
    if not isinstance(store_logits, bool) and store_logits != "auto":
        raise ValueError(f"store_logits must be True, False or 'auto', got {store_logits!r}")
    if store_logits is False and reasons:
        raise ValueError(f"store_logits must be True or 'auto' with {', '.join(reasons)}, got False")
    return bool(reasons) if store_logits == "auto" else bool(store_logits)


@torch.no_grad()
def _forward(
    hidden: Tensor, weight: Tensor, head: Head, request: Sampling | None, store: bool
) -> tuple[Any, Tensor]:
    """Statistics (None without a request) and the logits, of which only the shape counts unless stored."""
    n, vocab = hidden.shape[0], weight.shape[0]
    impl = dispatch.pick("sample_linear", hidden, weight, compute_dtype=head.compute_dtype, sampling=request)
    dtype = stored_dtype(head)
    logits = hidden.new_empty(n, vocab, dtype=dtype) if store else None
    with without_autocast(hidden.device):
        if request is None:
            impl.product(hidden, weight, head, logits)
            return None, logits  # type: ignore[return-value]
        stats = impl.forward(hidden, weight, head, request, logits)
    return stats, hidden.new_empty(0, vocab, dtype=dtype) if logits is None else logits


# Under torch.compile one opaque node, as ``sample``.


def _compiled(
    hidden: Tensor, weight: Tensor, head: Head, request: Sampling | None, store: bool
) -> tuple[Any, Tensor]:
    nothing: list[Any] = [1.0, 0, 1.0, 0.0, math.inf, *[None] * 5, "sequential", *[False] * 4, 0]
    any_request = Sampling(*nothing) if request is None else request
    parts = head.bias, head.logit_scale, head.softcap, head.logits_dtype, head.compute_dtype
    drawn = request is not None
    *stats, logits = _op(hidden, weight, *parts, store, drawn, *op.packed(any_request))
    return op.listed(stats, any_request) if drawn else None, logits


@torch.library.custom_op("rlkernel::sample_linear", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    store: bool,
    drawn: bool,
    temperature: float,
    temperatures: Tensor | None,
    top_k: int,
    top_ks: Tensor | None,
    top_p: float,
    top_ps: Tensor | None,
    min_p: float,
    min_ps: Tensor | None,
    top_n_sigma: float,
    top_n_sigmas: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    token_ids: Tensor | None,
    token_bitmask: Tensor | None,
    order: str,
    gumbel: bool,
    raw: bool,
    entropy: bool,
    rank: bool,
    support: int,
    thresholds: Tensor | None,
    band: Tensor | None,
) -> list[Tensor]:
    request = op.unpacked([
        temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps, top_n_sigma, top_n_sigmas,
        seeds, positions, token_ids, token_bitmask, order, gumbel, raw, entropy, rank, support,
        thresholds, band,
    ])  # fmt: skip
    head = Head(bias, 1.0, logit_scale, softcap, -100, logits_dtype, compute_dtype)
    stats, logits = _forward(hidden, weight, head, request if drawn else None, store)
    return [*(op.list_of(stats, None) if drawn else ()), logits]


@_op.register_fake
def _op_fake(  # type: ignore[no-untyped-def]
    hidden, weight, bias, logit_scale, softcap, logits_dtype, compute_dtype, store, drawn, *values
):
    head = Head(bias, 1.0, logit_scale, softcap, -100, logits_dtype, compute_dtype)
    n, dtype = hidden.shape[0], torch.promote_types(compute_dtype, torch.float32)
    stats = op.fake_list(n, hidden, dtype, values) if drawn else []
    return [*stats, hidden.new_empty(n if store else 0, weight.shape[0], dtype=stored_dtype(head))]
