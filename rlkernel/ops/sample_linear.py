"""Tokens drawn from hidden states and the lm_head, without the logits in memory where nobody filters."""

import functools
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel import dispatch
from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults, stored_dtype, transforms
from rlkernel.calls.sampling import SampleOutput, SampleStats, Sampling, SamplingCall
from rlkernel.drivers import sample_linear as driver
from rlkernel.opaque import Op
from rlkernel.ops import _validate, _vocab_parallel
from rlkernel.ops.linear_logprob import ALGORITHMS, checked_head, linear_logprob
from rlkernel.ops.sampling import inputs, options_of_sample, sharded, takes_options_of_sample
from rlkernel.ops.sampling.drawing import draw
from rlkernel.ops.sampling.options import SampleOptions
from rlkernel.ops.sampling.outputs import output
from rlkernel.runtime.modes import without_autocast
from rlkernel.types import LinearAlgorithm, StoreLogits


@takes_options_of_sample(SampleOptions)
def sample_linear(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    store_logits: bool | StoreLogits = "auto",
    algorithm: LinearAlgorithm = "auto",
    **options: Unpack[SampleOptions],
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
        algorithm: "tiled", as said above; "fused": the draw behind the product in one Triton kernel, which is
            batch-invariant, takes fp16 and bf16 and stores no logits, so an error where they must be and with
            ``group``; "auto": "tiled", until a GPU has shown the other to be faster.
        options: those of ``sample``, from ``temperature`` on.  With ``group`` a rank has some rows of weight
            and bias, and the same ``hidden`` as the others; DTensors are taken as in ``linear_logprob``.

    Returns:
        SampleOutput of [...] tensors, as ``sample``; constants without a gradient.

    Raises:
        ValueError: as ``sample`` and ``linear_logprob``; ``store_logits`` is False and logits are needed.

    Follows FlashSampling (arXiv 2603.15854), which has neither filters nor log-probabilities.

    Examples:
        >>> hidden, lm_head = torch.eye(3), 5 * torch.eye(3)
        >>> rlkernel.sample_linear(hidden, lm_head, temperature=0.0).token_ids
        tensor([0, 1, 2])
    """
    _validate.choice("algorithm", algorithm, ALGORITHMS)
    chosen = options_of_sample("sample_linear", options)
    weight, bias, group, start = _vocab_parallel.local_head(
        weight, bias, chosen["group"], chosen["vocab_start"]
    )
    group, start = _vocab_parallel.named(group, start)
    rounded = torch.float32 if logits_dtype is None else logits_dtype
    head = checked_head(
        hidden, weight, bias=bias, temperature=1.0, logit_scale=logit_scale, softcap=softcap,
        ignore_index=-100, logits_dtype=rounded, sharded=group is not None,
    )  # fmt: skip
    vocab = weight.shape[0]
    rows = inputs.Rows(hidden.shape[:-1], vocab, head.compute_dtype, hidden.device)
    flat = hidden.detach().reshape(rows.total, hidden.shape[-1])
    weight, head = weight.detach(), head._replace(bias=None if bias is None else bias.detach())
    if group is not None:
        if algorithm == "fused":
            raise ValueError("algorithm must be 'auto' or 'tiled' with group, got 'fused'")
        asked = SampleLinearCall(flat, weight, head, Sampling(), drawn=False, store=True)
        more = {"logit_scale": logit_scale, "softcap": softcap, "logits_dtype": logits_dtype}
        may_store = functools.partial(_store, store_logits)
        return sharded.sampled(_source(asked, start), group, start, rows, chosen | more, may_store=may_store)
    request, wanted, _ = inputs.asked(rows, chosen)
    reasons = inputs.looks_again(request, wanted, chosen, vocab)
    store = _store(store_logits, reasons)
    if algorithm == "fused" and store:
        given = ", ".join(reasons) or "store_logits=True"
        raise ValueError(f"algorithm must be 'auto' or 'tiled' with {given}, got 'fused'")
    logit_bias, penalties = chosen["logit_bias"], chosen["penalties"]
    drawn = logit_bias is None and penalties is None
    with torch.no_grad():
        made = SampleLinearResults(
            *op(SampleLinearCall(flat, weight, head, request, drawn, store or not drawn, algorithm))
        )
    logits, stats = made.logits, made.stats
    # what is stored behind a bias, a scale or a softcap was made by other operations than linear_logprob's
    scores = logits is None or transforms(head)
    raw = functools.partial(_scored, flat, weight, head) if scores else None
    if logits is None:  # of which only the shape counts
        logits = flat.new_empty(0, vocab, dtype=stored_dtype(head))
    z = None if drawn else inputs.adjusted(logits, rows, logit_bias, penalties)
    call = SamplingCall(logits, z, request, ("every statistic",))
    return output(rows.shape, call, draw(call) if stats is None else stats, wanted, chosen, raw)


def _scored(
    hidden: Tensor, weight: Tensor, head: Head, token_ids: Tensor, temperature: float | Tensor
) -> Tensor:
    return linear_logprob(
        hidden, weight, token_ids, bias=head.bias, temperature=temperature, logit_scale=head.logit_scale,
        softcap=head.softcap, logits_dtype=head.logits_dtype,
    ).logprobs  # fmt: skip


def _source(call: SampleLinearCall, vocab_start: int) -> sharded.Source:
    """The logits of this rank's rows of the weight, by tiles or at once."""

    def of(a: int, b: int) -> SampleLinearCall:
        a, b, bias = a - vocab_start, b - vocab_start, call.head.bias
        head = call.head._replace(bias=None if bias is None else bias[a:b])
        return call._replace(weight=call.weight[a:b], head=head)

    def tiles(a: int, b: int) -> Iterator[tuple[int, int, int, Tensor]]:
        with without_autocast(call.hidden.device):
            for r0, r1, v0, tile in driver.tiles(of(a, b), None):
                yield r0, r1, a + v0, tile

    def whole() -> Tensor:
        if not len(call.weight):
            return like
        logits = SampleLinearResults(*op(call)).logits
        assert logits is not None
        return logits

    like = call.hidden.new_empty(len(call.hidden), 0, dtype=stored_dtype(call.head))
    return sharded.Source("hidden", like, tiles, whole)


def _store(store_logits: bool | StoreLogits, reasons: list[str]) -> bool:
    if not isinstance(store_logits, bool) and store_logits != "auto":
        raise ValueError(f"store_logits must be True, False or 'auto', got {store_logits!r}")
    if store_logits is False and reasons:
        raise ValueError(f"store_logits must be True or 'auto' with {', '.join(reasons)}, got False")
    return bool(reasons) if store_logits == "auto" else bool(store_logits)


def _pick(call: SampleLinearCall) -> ModuleType:
    request = call.request if call.drawn else None
    options = {"compute_dtype": call.head.compute_dtype, "sampling": request, "algorithm": call.algorithm}
    return dispatch.pick("sample_linear", call.hidden, call.weight, **options)


def _forward(impl: ModuleType, call: SampleLinearCall) -> SampleLinearResults:
    with without_autocast(call.hidden.device):
        return impl.forward(call)


def _like(call: SampleLinearCall) -> SampleLinearResults:
    (rows, _), device, head = call.hidden.shape, call.hidden.device, call.head
    logits = None
    if call.store:
        logits = call.hidden.new_empty(rows, call.weight.shape[0], dtype=stored_dtype(head))
    stats = SampleStats.empty(rows, call.request, device, head.compute_dtype) if call.drawn else ()
    return SampleLinearResults(logits, *stats)


op = Op("sample_linear", SampleLinearCall, SampleLinearResults, pick=_pick, forward=_forward, like=_like)
