"""The arguments of ``sample`` and its kin, checked and normalised."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.sampling import FILTER_ORDERS, Sampling
from rlkernel.ops import _scalars, _validate
from rlkernel.ops._penalties import Penalties
from rlkernel.ops._sampling_ranks import RANKINGS, Wanted
from rlkernel.ops._token_bias import TokenBias
from rlkernel.runtime import debug, stream

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
METHODS = ("grouped", "gumbel")
LOGPROBS = ("raw", "tempered", "processed")
XTC_THRESHOLD = 0.1  # that of llama.cpp and text-generation-webui


class _Range(NamedTuple):
    """Numbers from ``low`` (more than that where ``above``) to ``high``; ``want`` says so in an error.

    Made once: most calls have the defaults, and a text for each of their errors took longer than the checks.
    """

    low: float
    high: float
    above: bool
    want: str

    def holds(self, x: float) -> bool:
        return (self.low < x if self.above else self.low <= x) and x <= self.high


_UNIT = _Range(0, 1, False, "in [0, 1]")
_SHARE = _Range(0, 1, True, "in (0, 1]")
_POSITIVE = _Range(0, math.inf, True, "> 0")
# of temperatures that are not 0: normal numbers, whose inverse is finite too
_NORMAL = {
    dtype: _Range(kind.tiny, kind.max, False, f"0 or from {kind.tiny:.3g} to {kind.max:.3g}")
    for dtype, kind in ((x, torch.finfo(x)) for x in (torch.float32, torch.float64))
}


def rows_of(logits: Tensor) -> tuple[torch.Size, Tensor]:
    """The leading shape of ``logits`` [..., V], and [B, V] with dense rows."""
    _validate.floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [..., V] with V >= 1, got {tuple(logits.shape)}")
    shape, flat = logits.shape[:-1], logits.detach()
    if len(shape) != 1:
        flat = flat.reshape(math.prod(shape), logits.shape[-1])
    return shape, flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def sampling(
    shape: torch.Size,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    temperature: float | Tensor,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
    top_n_sigma: float | Tensor | None,
    seeds: int | Tensor | None,
    positions: int | Tensor | None,
    token_ids: Tensor | None,
    token_bitmask: Tensor | None,
    filter_order: str,
    method: str,
    return_logprobs: tuple[str, ...],
    return_entropy: bool,
    return_rank: bool,
    return_support: int,
    epsilon_cutoff: float | Tensor | None = None,
    eta_cutoff: float | Tensor | None = None,
    top_a: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    xtc_probability: float | Tensor | None = None,
    xtc_threshold: float | Tensor = XTC_THRESHOLD,
) -> Sampling:
    """Raises ValueError for what is off."""
    _validate.choice("filter_order", filter_order, FILTER_ORDERS)
    _validate.choice("method", method, METHODS)
    if isinstance(return_logprobs, str):
        raise ValueError(f"return_logprobs must be a tuple of names, got {return_logprobs!r}")
    for each in return_logprobs:
        _validate.choice("return_logprobs", each, LOGPROBS)
    count("return_support", return_support, 2**31 - 1)
    where = shape, device
    if token_ids is None or seeds is not None:
        seeds = _seeds(seeds, *where)
    positions = None if positions is None else _integers("positions", positions, *where)
    wide = torch.promote_types(dtype, torch.float32)
    return Sampling(
        temperature=_temperature(temperature, *where, wide),
        top_k=_top_k(top_k, *where),
        top_p=1.0 if top_p is None else _floats("top_p", top_p, _SHARE, *where),
        min_p=0.0 if min_p is None else _floats("min_p", min_p, _UNIT, *where),
        top_n_sigma=math.inf
        if top_n_sigma is None
        else _floats("top_n_sigma", top_n_sigma, _POSITIVE, *where),
        seeds=seeds if token_ids is None else None,
        positions=positions if token_ids is None else None,
        token_ids=token_ids,
        token_bitmask=_bitmask(token_bitmask, vocab, *where),
        skip=None,
        order=filter_order,
        gumbel=method == "gumbel",
        raw="raw" in return_logprobs,
        entropy=bool(return_entropy),
        rank=bool(return_rank),
        support=int(return_support),
        thresholds=None
        if epsilon_cutoff is None and eta_cutoff is None and top_a is None
        else _thresholds(
            {"epsilon_cutoff": epsilon_cutoff, "eta_cutoff": eta_cutoff, "top_a": top_a}, *where
        ),
        band=_band(typical_p, xtc_probability, xtc_threshold, seeds, positions, *where),
    )


def _thresholds(
    given: dict[str, float | Tensor | None], shape: torch.Size, device: torch.device
) -> Tensor | None:
    """[B, 3]; None where all are numbers and off."""
    columns = [0.0 if x is None else _floats(name, x, _UNIT, shape, device) for name, x in given.items()]
    if not any(isinstance(x, Tensor) or x > 0 for x in columns):
        return None
    rows, fp32 = math.prod(shape), torch.float32
    made = [
        x if isinstance(x, Tensor) else torch.full((rows,), x, dtype=fp32, device=device) for x in columns
    ]
    return torch.stack(made, -1)


def _band(
    typical_p: float | Tensor | None,
    xtc_probability: float | Tensor | None,
    xtc_threshold: float | Tensor,
    seeds: Any,
    positions: Any,
    shape: torch.Size,
    device: torch.device,
) -> Tensor | None:
    """[B, 2]; None where all are numbers and off.  Which rows XTC is on in is drawn here."""
    plain = isinstance(xtc_threshold, float) and xtc_threshold == XTC_THRESHOLD
    if typical_p is None and xtc_probability is None and plain:
        return None
    typical = 1.0 if typical_p is None else _floats("typical_p", typical_p, _SHARE, shape, device)
    threshold = _floats("xtc_threshold", xtc_threshold, _SHARE, shape, device)
    chance = (
        0.0 if xtc_probability is None else _floats("xtc_probability", xtc_probability, _UNIT, shape, device)
    )
    excludes = isinstance(chance, Tensor) or chance > 0
    if not excludes and not isinstance(typical, Tensor) and typical == 1:
        return None
    made = torch.ones(2, math.prod(shape), dtype=torch.float32, device=device)
    made[0] = typical
    if excludes:
        if seeds is None:
            raise ValueError("seeds must be given with xtc_probability, of which they are the draw, got None")
        places = torch.zeros_like(seeds) if positions is None else positions
        u = stream.row_uniform(stream.XTC, seeds, places)
        made[1] = torch.where(u < chance, threshold, 1.0)
        # on a GPU nobody has looked at tensors; a row has what is asked also where XTC is not drawn
        if isinstance(chance, Tensor):
            made[1] = torch.where((chance >= 0) & (chance <= 1), made[1], torch.nan)
        if isinstance(threshold, Tensor):
            made[1] = torch.where((threshold > 0) & (threshold <= 1), made[1], torch.nan)
    return made.t().contiguous()


def count(argument: str, value: int, most: int) -> int:
    number = _scalars.as_int(value)
    if number is None or not 0 <= number <= most:
        raise ValueError(f"{argument} must be an integer in [0, {most}], got {value!r}")
    return number


def wanted(
    ranking: str, top: int, token_ids: Tensor | None, shape: torch.Size, vocab: int, device: torch.device
) -> Wanted:
    """Raises ValueError for what is off."""
    _validate.choice("ranking", ranking, RANKINGS)
    count("top_logprobs", top, vocab)
    if token_ids is None:
        return Wanted(ranking, top, None)
    if not isinstance(token_ids, Tensor) or token_ids.dtype not in INTEGERS:
        got = _validate.name(token_ids.dtype) if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise ValueError(f"logprob_token_ids must be an integer tensor, got {got}")
    if token_ids.dim() == 0 or token_ids.shape[:-1] not in ((), shape):
        want = f"[K] or {(*shape, 'K')}".replace("'", "")
        raise ValueError(f"logprob_token_ids must have shape {want}, got {tuple(token_ids.shape)}")
    _validate.same_device("logprob_token_ids", token_ids, "logits", device)
    _validate.look(
        "logprob_token_ids", token_ids.flatten(), lambda x: -1 <= x < vocab, f"in [0, {vocab}), or -1"
    )
    k = token_ids.shape[-1]
    return Wanted(ranking, top, token_ids.long().expand(*shape, k).reshape(math.prod(shape), k))


def forced(token_ids: Tensor, shape: torch.Size, vocab: int, device: torch.device) -> Tensor:
    token_ids = _validate.target_ids(token_ids, shape, "the rows of logits", device, "token_ids")
    if debug.may_read(token_ids) and token_ids.numel():
        bad = (token_ids < 0) | (token_ids >= vocab)
        if bad.any():
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"token_ids{where or ''} = {token_ids[tuple(where)].item()} is outside [0, {vocab})"
            )
    return token_ids.reshape(-1).contiguous()


def _seeds(value: int | Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    if value is not None:
        return _integers("seeds", value, shape, device)
    # torch's generator: reproducible by torch.manual_seed, and it advances inside a CUDA graph
    return torch.randint(-(2**63), 2**63 - 1, (math.prod(shape),), dtype=torch.int64, device=device)


def _integers(argument: str, value: int | Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return _per_row(argument, int64(argument, value), shape, device, torch.int64)
    return torch.full((math.prod(shape),), int64_of(argument, value), dtype=torch.int64, device=device)


def int64(argument: str, value: Tensor) -> Tensor:
    """64-bit words; those of uint64 keep their bits."""
    if value.dtype == torch.uint64:
        return value.view(torch.int64)
    if value.dtype not in INTEGERS:
        raise ValueError(f"{argument} must be integers, got {_validate.name(value.dtype)}")
    return value


def int64_of(argument: str, value: Any) -> int:
    """A number below 2**64 as the int64 with its bits."""
    number = _scalars.as_int(value)
    if number is None or not -(2**63) <= number < 2**64:
        raise ValueError(f"{argument} must be a 64-bit integer or a tensor, got {value!r}")
    return number if number < 2**63 else number - 2**64


def _top_k(value: int | Tensor | None, shape: torch.Size, device: torch.device) -> int | Tensor:
    """0 and -1 mean all, as in vLLM and SGLang."""
    if value is None:
        return 0
    if not isinstance(value, Tensor):
        number = _scalars.as_int(value)
        if number is None or number < -1:
            raise ValueError(f"top_k must be an integer >= 1, or 0 or -1 for all, got {value!r}")
        return min(max(number, 0), 2**63 - 1)
    if value.dtype not in INTEGERS:
        raise ValueError(f"top_k must be integers, got {_validate.name(value.dtype)}")
    value = _per_row("top_k", value, shape, device, torch.int64)
    _validate.look("top_k", value, lambda x: x >= -1, ">= 1, or 0 or -1 for all")
    return value


def _temperature(
    value: float | Tensor, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> float | Tensor:
    """0, or a normal number."""
    normal = _NORMAL[dtype]
    if isinstance(value, Tensor):
        value = _numbers("temperature", value, shape, device, dtype)
        if debug.may_read(value) and value.numel():
            low, high = value.aminmax()
            if not (normal.low <= low.item() and high.item() <= normal.high):  # 0, or a wrong one
                _validate.look("temperature", torch.where(value == 0, 1, value), normal.holds, normal.want)
        return value
    number = _number("temperature", value, dtype)
    if number != 0 and not normal.holds(number):
        raise ValueError(f"temperature must be {normal.want}, got {value}")
    return number


def _floats(
    argument: str, value: float | Tensor, range: _Range, shape: torch.Size, device: torch.device
) -> float | Tensor:
    """One number, or one per row."""
    if isinstance(value, Tensor):
        value = _numbers(argument, value, shape, device, torch.float32)
        _validate.look(argument, value, range.holds, range.want)
        return value
    number = _number(argument, value, torch.float32)
    if not range.holds(number):
        raise ValueError(f"{argument} must be {range.want}, got {value}")
    return number


def _number(argument: str, value: Any, dtype: torch.dtype) -> float:
    """In ``dtype``, in which a kernel has it: only what is left of a number may be in range or not."""
    if not _scalars.is_number(value):
        raise ValueError(f"{argument} must be a number or a tensor, got {type(value).__name__}")
    return _scalars.rounded(value, dtype)


def _numbers(
    argument: str, value: Tensor, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Likewise of a tensor, whose values are not looked at."""
    if value.dtype == torch.bool or value.is_complex():
        raise ValueError(f"{argument} must be numbers, got {_validate.name(value.dtype)}")
    if value.requires_grad:
        raise ValueError(f"{argument} must not require a gradient, got requires_grad=True")
    return _per_row(argument, value, shape, device, dtype)


def _per_row(
    argument: str, value: Tensor, shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if value.dim() and value.shape != shape:
        want = f"one value or have shape {tuple(shape)}"
        raise ValueError(f"{argument} must be {want}, got {tuple(value.shape)}")
    if value.dim() or value.is_meta:  # one value may be of any device, but there it is none
        _validate.same_device(argument, value, "logits", device)
        if value.dim() == 1:
            return _validate.dense(value, dtype)
    return value.to(device).expand(shape).reshape(-1).to(dtype).contiguous()


def _bitmask(bitmask: Tensor | None, vocab: int, shape: torch.Size, device: torch.device) -> Tensor | None:
    """[B, ceil(V / 32)] of a mask of any width: of a padded vocabulary, or of a tokenizer with fewer tokens.

    Tokens behind the mask are not allowed, as no grammar wants them.
    """
    if bitmask is None:
        return None
    words = -(-vocab // 32)
    want = (*shape, words)
    fits = isinstance(bitmask, Tensor) and bitmask.dtype == torch.int32
    if not fits or bitmask.shape[:-1] != shape or bitmask.dim() == 0 or bitmask.shape[-1] == 0:
        got = type(bitmask).__name__
        if isinstance(bitmask, Tensor):
            got = f"{_validate.name(bitmask.dtype)} {tuple(bitmask.shape)}"
        raise ValueError(f"token_bitmask must be int32 of shape {want}, got {got}")
    _validate.same_device("token_bitmask", bitmask, "logits", device)
    flat = bitmask.reshape(math.prod(shape), bitmask.shape[-1])
    if flat.shape[1] < words:
        return torch.nn.functional.pad(flat, (0, words - flat.shape[1]))
    if flat.shape[1] > words:
        flat = flat[:, :words]
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def adjusted(logits: Tensor, shape: torch.Size, logit_bias: Any, penalties: Any) -> Tensor | None:
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
            _token_bias(logit_bias, shape, z).add_to(z)
    else:
        z = logits.to(dtype)
        if logit_bias is not None:
            z = z + _bias(logit_bias, shape, z)
    return z if penalties is None else checked(penalties).apply(z)


def checked(penalties: Any) -> Penalties:
    if not isinstance(penalties, Penalties):
        raise ValueError(f"penalties must be rlkernel.Penalties, got {type(penalties).__name__}")
    return penalties


def _token_bias(bias: Any, shape: torch.Size, z: Tensor) -> TokenBias:
    if isinstance(bias, TokenBias):
        return bias.flat(shape)
    rows = z.shape[0]
    if len(bias) != rows:
        raise ValueError(f"logit_bias must be one dict or None for each of {rows} rows, got {len(bias)}")
    return TokenBias.of(bias, z.shape[1], z.device)


def _bias(bias: Any, shape: torch.Size, z: Tensor) -> Tensor:
    vocab = z.shape[1]
    _validate.floating("logit_bias", bias)
    if bias.shape not in ((vocab,), (*shape, vocab)):
        want = f"{(vocab,)} or {(*shape, vocab)}"
        raise ValueError(f"logit_bias must have shape {want}, got {tuple(bias.shape)}")
    _validate.same_device("logit_bias", bias, "logits", z.device)
    bias = bias.detach().to(z.dtype)
    if debug.may_read(bias) and bias.numel() and not bias.max().item() < math.inf:
        where = (~(bias < math.inf)).nonzero()[0].tolist()
        raise ValueError(f"logit_bias{where} must be finite or -inf, got {bias[tuple(where)].item()}")
    return bias.reshape(-1, vocab)
