"""The arguments of ``sample`` and its kin, checked and normalised."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls import sampling as calls
from rlkernel.calls.sampling import Sampling
from rlkernel.ops import _validate
from rlkernel.ops._validate import Range
from rlkernel.ops.sampling import numbers
from rlkernel.ops.sampling.numbers import Rows
from rlkernel.ops.sampling.penalties import Penalties
from rlkernel.ops.sampling.ranks import Wanted
from rlkernel.ops.sampling.token_bias import TokenBias
from rlkernel.reference import sampling_stream as stream
from rlkernel.runtime import debug

# a text for each of their errors takes longer to make than the checks of most calls
_UNIT, _SHARE = Range(0, 1, False, "in [0, 1]", absent=0.0), Range(0, 1, True, "in (0, 1]", absent=1.0)
RANGES = {
    "top_p": _SHARE,
    "min_p": _UNIT,
    "top_n_sigma": Range(0, math.inf, True, "> 0", absent=math.inf),
    **dict.fromkeys(calls.THRESHOLDS, _UNIT),
    "typical_p": _SHARE,
    "xtc_probability": _UNIT,
}
_TOP_K, _ROOM = ">= 1, or 0 or -1 for all", f"an integer in [0, {2**31 - 1}]"
# of temperatures that are not 0: normal numbers, whose inverse is finite too
_NORMAL = {
    dtype: Range(kind.tiny, kind.max, False, f"0 or from {kind.tiny:.3g} to {kind.max:.3g}")
    for dtype, kind in ((x, torch.finfo(x)) for x in (torch.float32, torch.float64))
}


def rows_of(logits: Tensor, sharded: bool = False) -> tuple[Rows, Tensor]:
    """``logits`` [..., V] as [B, V] with dense rows; of a rank's shard V may be 0."""
    _validate.floating("logits", logits)
    if logits.dim() == 0 or (logits.shape[-1] == 0 and not sharded):
        raise ValueError(f"logits must be [..., V] with V >= 1, got {tuple(logits.shape)}")
    shape, flat = logits.shape[:-1], logits.detach() if logits.requires_grad else logits
    rows = Rows(shape, logits.shape[-1], logits.dtype, logits.device)
    if len(shape) != 1:
        flat = flat.reshape(rows.total, rows.vocab)
    if flat.stride(-1) == 1 or rows.vocab == 1:
        return rows, flat
    return rows, flat.clone(memory_format=torch.contiguous_format)  # contiguous() lets strides of no row be


def asked(
    rows: Rows, options: dict[str, Any], token_ids: Tensor | None = None
) -> tuple[Sampling, Wanted, tuple[str, ...]]:
    """Of the options of ``sample``: what kernels are asked, what is wanted beside it, and what a library must
    be able to do; raises ValueError for what is off."""
    also = wanted(options["ranking"], options["top_logprobs"], options["logprob_token_ids"], rows)
    asks = request(rows, options, token_ids)
    names = {
        "logprobs": options["return_logprobs"], "entropy": asks.entropy, "rank": asks.rank,
        "support": asks.support, "top_logprobs": also.top, "logprob_token_ids": also.token_ids is not None,
        "token_ids": token_ids is not None, "seeds": options["seeds"] is not None and token_ids is None,
    }  # fmt: skip
    return asks, also, tuple([name for name, want in names.items() if want])


def looks_again(asks: Sampling, also: Wanted, options: dict[str, Any], vocab: int) -> list[str]:
    """What of the arguments needs the logits behind the first pass over them."""
    reasons = {"a filter": asks.may_filter(vocab), "return_rank": asks.rank, "top_logprobs": also.top}
    given = ("logprob_token_ids", "logit_bias", "penalties")
    reasons |= {name: options[name] is not None for name in given}
    return [name for name, needed in reasons.items() if needed]


def request(rows: Rows, options: dict[str, Any], token_ids: Tensor | None = None) -> Sampling:
    """Likewise, of what the kernels are told."""
    order, method, logprobs = options["filter_order"], options["method"], options["return_logprobs"]
    _validate.choice("filter_order", order, calls.FILTER_ORDERS)
    _validate.choice("method", method, calls.METHODS)
    if isinstance(logprobs, str) or not isinstance(logprobs, Collection):
        raise ValueError(f"return_logprobs must be a tuple of names, got {logprobs!r}")
    for each in logprobs:
        _validate.choice("return_logprobs", each, calls.LOGPROBS)
    _validate.choice("greedy_logprobs", options["greedy_logprobs"], calls.GREEDY_LOGPROBS)
    support = numbers.whole("return_support", options["return_support"], 0, 2**31 - 1, _ROOM)
    seeds, positions, drawn = options["seeds"], options["positions"], token_ids is None
    if drawn or seeds is not None:
        seeds = seeds_of(seeds, rows)
    if positions is not None:
        positions = _integers("positions", positions, rows)
    return Sampling(
        temperature=temperature_of(options["temperature"], rows),
        top_k=_top_k(options["top_k"], rows),
        top_p=_float("top_p", options, rows),
        min_p=_float("min_p", options, rows),
        top_n_sigma=_float("top_n_sigma", options, rows),
        seeds=seeds if drawn else None,
        positions=positions if drawn else None,
        token_ids=token_ids,
        token_bitmask=_bitmask(options["token_bitmask"], rows),
        order=order,
        gumbel=method == "gumbel",
        greedy_softmax=options["greedy_logprobs"] == "softmax",
        raw="raw" in logprobs,
        entropy=bool(options["return_entropy"]),
        rank=bool(options["return_rank"]),
        rank_ties=_rank_ties(options["rank_ties"], options["ranking"]),
        support=support,
        softmax=bool(options["top_logprobs"]) or options["logprob_token_ids"] is not None,
        thresholds=_thresholds(options, rows),
        band=_band(options, seeds, positions, rows),
    )


def _rank_ties(ties: str, ranking: str) -> str:
    _validate.choice("rank_ties", ties, calls.RANK_TIES[:2])
    return "kept" if ties == "max" and ranking == "processed" else ties


def _float(name: str, options: dict[str, Any], rows: Rows) -> float | Tensor:
    """One number, or one per row."""
    value, range = options[name], RANGES[name]
    if value is None:
        assert range.absent is not None
        return range.absent
    return numbers.within(range, name, value, rows)


def _thresholds(options: dict[str, Any], rows: Rows) -> Tensor | None:
    """[B, THRESHOLDS]; None where all are numbers and off."""
    columns = [_float(name, options, rows) for name in calls.THRESHOLDS]
    if not any(isinstance(x, Tensor) or x > 0 for x in columns):
        return None
    made = torch.empty(len(columns), rows.total, dtype=torch.float32, device=rows.device)
    for column, x in zip(made, columns, strict=True):
        column.copy_(x) if isinstance(x, Tensor) else column.fill_(x)
    return made.t().contiguous()


def _band(options: dict[str, Any], seeds: Any, positions: Any, rows: Rows) -> Tensor | None:
    """[B, BAND]; None where all are numbers and off.  Which rows XTC is on in is drawn here."""
    typical, chance = _float("typical_p", options, rows), _float("xtc_probability", options, rows)
    threshold = numbers.within(_SHARE, "xtc_threshold", options["xtc_threshold"], rows)
    excludes = isinstance(chance, Tensor) or chance > 0
    if not excludes and not isinstance(typical, Tensor) and typical == 1:
        return None
    made = torch.ones(2, rows.total, dtype=torch.float32, device=rows.device)
    made[0] = typical
    if excludes:
        if seeds is None:
            raise ValueError("seeds must be given with xtc_probability, of which they are the draw, got None")
        u = stream.row_uniform(calls.Domain.XTC, *Sampling(seeds=seeds, positions=positions).key)
        made[1] = torch.where(u < chance, threshold, 1.0)
        # on a GPU nobody has looked at tensors; a row has what is asked also where XTC is not drawn
        if isinstance(chance, Tensor):
            made[1] = torch.where((chance >= 0) & (chance <= 1), made[1], torch.nan)
        if isinstance(threshold, Tensor):
            made[1] = torch.where((threshold > 0) & (threshold <= 1), made[1], torch.nan)
    return made.t().contiguous()


def wanted(ranking: str, top: int, token_ids: Tensor | None, rows: Rows) -> Wanted:
    """Raises ValueError for what is off."""
    _validate.choice("ranking", ranking, calls.RANKINGS)
    numbers.whole("top_logprobs", top, 0, rows.vocab, f"an integer in [0, {rows.vocab}]")
    if token_ids is None:
        return Wanted(ranking, top, None)
    k = numbers.of_width("logprob_token_ids", token_ids, rows, any_integer=True)
    _validate.same_device("logprob_token_ids", token_ids, "logits", rows.device)
    inside = Range(-1, rows.vocab - 1, False, f"in [0, {rows.vocab}), or -1")
    _validate.look("logprob_token_ids", token_ids.flatten(), inside.holds, inside.want)
    return Wanted(ranking, top, token_ids.long().expand(*rows.shape, k).reshape(rows.total, k))


def forced(token_ids: Tensor, rows: Rows) -> Tensor:
    token_ids = _validate.target_ids(token_ids, rows.shape, "the rows of logits", rows.device, "token_ids")
    if debug.may_read(token_ids) and token_ids.numel():
        bad = (token_ids < 0) | (token_ids >= rows.vocab)
        if bad.any():
            where = bad.nonzero()[0].tolist()
            got = f"{token_ids[tuple(where)].item()} is outside [0, {rows.vocab})"
            raise ValueError(f"token_ids{where or ''} = {got}")
    return token_ids.reshape(-1).contiguous()


def seeds_of(value: int | Tensor | None, rows: Rows) -> Tensor:
    if value is not None:
        return _integers("seeds", value, rows)
    # torch's generator: reproducible by torch.manual_seed, and it advances inside a CUDA graph
    return torch.randint(-(2**63), 2**63 - 1, (rows.total,), dtype=torch.int64, device=rows.device)


def _integers(argument: str, value: int | Tensor, rows: Rows) -> Tensor:
    if isinstance(value, Tensor):
        return numbers.per_row(argument, numbers.int64(argument, value), rows, torch.int64)
    return torch.full((rows.total,), numbers.int64(argument, value), dtype=torch.int64, device=rows.device)


def _top_k(value: int | Tensor | None, rows: Rows) -> int | Tensor:
    """0 and -1 mean all, as in vLLM and SGLang."""
    if value is None:
        return 0
    if not isinstance(value, Tensor):
        number = numbers.whole("top_k", value, -1, math.inf, f"an integer {_TOP_K}")
        return min(max(number, 0), 2**63 - 1)
    value = numbers.per_row("top_k", numbers.integers("top_k", value), rows, torch.int64)
    _validate.look("top_k", value, lambda x: x >= -1, _TOP_K)
    return value


def temperature_of(value: float | Tensor, rows: Rows) -> float | Tensor:
    """0, or a normal number."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    normal = _NORMAL[dtype]
    if isinstance(value, Tensor):
        value = numbers.each("temperature", value, rows, dtype)
        if debug.may_read(value) and value.numel():
            low, high = value.aminmax()
            if not (normal.low <= low.item() and high.item() <= normal.high):  # 0, or a wrong one
                _validate.look("temperature", torch.where(value == 0, 1, value), normal.holds, normal.want)
        return value
    single = numbers.one("temperature", value, dtype)
    if single != 0 and not normal.holds(single):
        raise ValueError(f"temperature must be {normal.want}, got {value}")
    return single


def _bitmask(bitmask: Tensor | None, rows: Rows) -> Tensor | None:
    """[B, ceil(V / 32)] of a mask of any width: of a padded vocabulary, or of a tokenizer with fewer tokens.

    Tokens behind the mask are not allowed, as no grammar wants them.
    """
    if bitmask is None:
        return None
    words = -(-rows.vocab // 32)
    want = (*rows.shape, words)
    fits = isinstance(bitmask, Tensor) and bitmask.dtype == torch.int32
    if not fits or bitmask.shape[:-1] != rows.shape or bitmask.dim() == 0 or bitmask.shape[-1] == 0:
        raise ValueError(f"token_bitmask must be int32 of shape {want}, got {numbers.described(bitmask)}")
    _validate.same_device("token_bitmask", bitmask, "logits", rows.device)
    flat = bitmask.reshape(rows.total, bitmask.shape[-1])
    if flat.shape[1] < words:
        return torch.nn.functional.pad(flat, (0, words - flat.shape[1]))
    if flat.shape[1] > words:
        flat = flat[:, :words]
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def adjusted(logits: Tensor, rows: Rows, logit_bias: Any, penalties: Any) -> Tensor | None:
    """The logits [B, V] after bias and penalties, in that order as in vLLM; None where there are none."""
    if logit_bias is None and penalties is None:
        return None
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(logit_bias, (Sequence, Mapping)):  # of few tokens
        z = logits.to(dtype, copy=True)
        if isinstance(logit_bias, Mapping):  # one for all rows, with every token once
            ids, values = TokenBias.of([logit_bias], z.shape[1], z.device)
            z[:, ids[0]] += values[0].to(dtype)  # type: ignore[index]
        else:
            token_bias(logit_bias, rows).add_to(z)
    else:
        z = logits.to(dtype)
        if logit_bias is not None:
            z = z + _bias(logit_bias, rows, z)
    return z if penalties is None else checked(penalties).apply(z)


def bias_of_rows(bias: Any, rows: Rows, a: int, b: int, z: Tensor) -> Any:
    """What ``adjusted`` takes for the rows from ``a`` to ``b`` of ``z``."""
    if bias is None or isinstance(bias, Mapping):
        return bias
    if isinstance(bias, Sequence):  # dicts, or a TokenBias
        return token_bias(bias, rows).of_rows(a, b, z)
    made = _bias(bias, rows, z)
    return made[0] if bias.dim() == 1 else made[a:b]


def checked(penalties: Any) -> Penalties:
    if not isinstance(penalties, Penalties):
        raise ValueError(f"penalties must be rlkernel.Penalties, got {type(penalties).__name__}")
    return penalties


def token_bias(bias: Any, rows: Rows, whose: str = "rows") -> TokenBias:
    if isinstance(bias, TokenBias):
        return bias.flat(rows)
    if len(bias) != rows.total:
        want = f"one dict or None for each of {rows.total} {whose}"
        raise ValueError(f"logit_bias must be {want}, got {len(bias)}")
    return TokenBias.of(bias, rows.vocab, rows.device)


def _bias(bias: Any, rows: Rows, z: Tensor) -> Tensor:
    one, each = (rows.vocab,), (*rows.shape, rows.vocab)
    _validate.constant("logit_bias", bias)
    if not _validate.among(bias.shape, one, each):
        want = f"{one} or {each}"
        raise ValueError(f"logit_bias must have shape {want}, got {tuple(bias.shape)}")
    _validate.same_device("logit_bias", bias, "logits", z.device)
    bias = bias.detach().to(z.dtype)
    if debug.may_read(bias) and bias.numel() and not bias.max().item() < math.inf:
        where = (~(bias < math.inf)).nonzero()[0].tolist()
        raise ValueError(f"logit_bias{where} must be finite or -inf, got {bias[tuple(where)].item()}")
    return bias.reshape(-1, rows.vocab)
