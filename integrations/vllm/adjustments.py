"""What a batch does to its logits before a token is drawn, in the arguments of ``rlkernel.sample``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

import rlkernel
from rlkernel.ops.sampling import inputs

EPSILON = 1e-5  # below which a temperature means the likeliest token

BUILT_IN = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)


class Adjusted(NamedTuple):
    """The logits that the token is drawn from, and the options that say the rest."""

    logits: Tensor
    options: dict[str, Any]
    tokens: Tensor | None = None  # [n], where they are drawn already


def adjusted(sampler: Any, logits: Tensor, metadata: Any, whole: bool) -> Adjusted:
    """Few tokens' biases, bans and penalties as options; as logits of their own where that cannot say it.

    ``whole`` asks for the latter.
    """
    n = logits.shape[0]
    options: dict[str, Any] = {"temperature": temperature(metadata)}
    for name in ("top_k", "top_p"):
        if (value := getattr(metadata, name)) is not None:
            options[name] = value[:n]
    invariant = metadata.logitsprocs.argmax_invariant
    if whole or not sayable(metadata):
        z = logits.to(torch.float32, copy=True)
        z = sampler.apply_logits_processors(z, metadata, False)
        z.clamp_(max=torch.finfo(z.dtype).max)  # a token that inf forces is drawn; NaN stays
        if any(type(processor) is not MinPLogitsProcessor for processor in invariant):
            # written for logits that the temperature has divided
            if metadata.temperature is not None:
                t = metadata.temperature
                z.div_(torch.where(t < EPSILON, 1.0, t)[:, None])
                options["temperature"] = torch.where(t < EPSILON, 0.0, 1.0)
                for processor in invariant:
                    z = processor.apply(z)
            return Adjusted(z, options)
        logits = z
    else:
        said = metadata.output_token_ids[:n] or [[] for _ in range(n)]
        options |= _options(metadata, list(range(n)), said, [0] * n, slice(n))
    for processor in invariant:
        if processor.min_p_count:
            options["min_p"] = processor.min_p_device[:n]
    return Adjusted(logits, options)


def temperature(metadata: Any) -> float | Tensor:
    t = metadata.temperature
    if metadata.all_greedy or t is None:
        return 0.0
    return t if metadata.all_random else torch.where(t < EPSILON, 0.0, t)


def sayable(metadata: Any) -> bool:
    """Whether options can say all that changes the logits."""
    holder = metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        return False
    return all(
        type(each) in BUILT_IN and not _restores(each) and not _is_endless(each)
        for each in metadata.logitsprocs.all
    )


def unchanged(metadata: Any) -> bool:
    """Whether a batch asks for its logits as they are, and for all of their tokens."""
    holder = metadata.thinking_budget_state_holder
    if metadata.top_k is not None or metadata.top_p is not None or not metadata.no_penalties:
        return False
    if metadata.allowed_token_ids_mask is not None or metadata.bad_words_token_ids:
        return False
    if holder is not None and holder.has_tracked_requests():
        return False
    return all(map(_is_idle, metadata.logitsprocs.all))


def _is_idle(processor: Any) -> bool:
    kind = type(processor)
    if kind is LogitBiasLogitsProcessor:
        return not processor.biases
    if kind is MinTokensLogitsProcessor:
        return not processor.min_toks
    return kind is MinPLogitsProcessor and not processor.min_p_count


def _is_endless(processor: Any) -> bool:
    """Of a bias of inf or NaN, which an option would refuse, and with it end the engine for all requests."""
    return type(processor) is LogitBiasLogitsProcessor and not all(
        value < torch.inf for values in processor.biases.values() for value in values.values()
    )


def _restores(processor: Any) -> bool:
    """Of a structured output it gives back the end of the text where nothing else is left."""
    return type(processor) is MinTokensLogitsProcessor and any(x[3] for x in processor.min_toks.values())


class Places(NamedTuple):
    """The rows of logits where requests have drafts: one for each draft, and one behind the last."""

    lengths: Tensor  # [B], how many drafts
    first: Tensor  # [B], the request's first row
    request: Tensor  # [n], whose row it is
    place: Tensor  # [n], how many drafts stand before
    drafts: Tensor  # [B, K], -1 behind the last

    @classmethod
    def of(cls, lengths: list[int], draft_token_ids: Tensor, device: torch.device) -> Places:
        many = torch.tensor(lengths, device="cpu")
        first = (many + 1).cumsum(0) - (many + 1)
        request = torch.arange(len(lengths), device="cpu").repeat_interleave(many + 1)
        place = torch.arange(len(request), device="cpu") - first[request]
        is_draft = place < many[request]
        table = torch.full((len(lengths), max(lengths)), -1, dtype=draft_token_ids.dtype, device=device)
        table[request[is_draft].to(device), place[is_draft].to(device)] = draft_token_ids
        return cls(many.to(device), first.to(device), request.to(device), place.to(device), table)


def drafted(metadata: Any, places: Places) -> dict[str, Any]:
    """The options of all rows; the drafts before a place count as output, as they do when they stand."""
    request = places.request
    options: dict[str, Any] = {"temperature": temperature(metadata)}
    for name in ("temperature", "top_k", "top_p"):
        value = options.get(name, getattr(metadata, name))
        if value is not None:
            options[name] = value[request] if isinstance(value, Tensor) else value
    owners, before = request.tolist(), places.place.tolist()
    said = [list(x) for x in metadata.output_token_ids] or [[] for _ in places.lengths]
    drafts = metadata.spec_token_ids or places.drafts.tolist()
    histories = [said[i] + list(drafts[i][:j]) for i, j in zip(owners, before, strict=True)]
    return options | _options(metadata, owners, histories, before, request)


def written(logits: Tensor, options: dict[str, Any]) -> Adjusted:
    """With biases, penalties and bans in the logits; temperature and filters stay options."""
    left = dict(options)
    bias, penalties, mask = (left.pop(name, None) for name in ("logit_bias", "penalties", "token_bitmask"))
    rows, flat = inputs.rows_of(logits)
    made = inputs.adjusted(flat, rows, bias, penalties)
    if mask is not None:
        allowed = unpacked(mask, logits.shape[1])
        made = (logits if made is None else made).to(torch.float32).masked_fill(~allowed, -torch.inf)
    return Adjusted(logits if made is None else made, left)


def _options(
    metadata: Any, owners: list[int], said: list[list[int]], ahead: list[int], index: Tensor | slice
) -> dict[str, Any]:
    """Of rows of the requests ``owners``, which have ``said`` so much, ``ahead`` of it drafts."""
    options: dict[str, Any] = {}
    rows = [_biases(metadata, *row) for row in zip(owners, said, ahead, strict=True)]
    if any(rows):
        options["logit_bias"] = rows
    if metadata.allowed_token_ids_mask is not None:
        options["token_bitmask"] = packed(~metadata.allowed_token_ids_mask[index])
    if not metadata.no_penalties:
        options["penalties"] = rlkernel.Penalties(
            padded(said, metadata.prompt_token_ids.device),
            metadata.prompt_token_ids[index],
            repetition=metadata.repetition_penalties[index],
            frequency=metadata.frequency_penalties[index],
            presence=metadata.presence_penalties[index],
        )
    return options


def _biases(metadata: Any, row: int, said: list[int], ahead: int) -> dict[int, float]:
    made: dict[int, float] = {}
    for token, value in _biases_of(metadata, row, said, ahead):
        made[token] = made.get(token, 0.0) + value
    return made


def _biases_of(metadata: Any, row: int, said: list[int], ahead: int) -> Iterator[tuple[int, float]]:
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if type(processor) is LogitBiasLogitsProcessor:
            yield from processor.biases.get(row, {}).items()
        elif row in processor.min_toks:
            least, own, stops, _ = processor.min_toks[row]
            if not ahead or len(own) + ahead < least:
                yield from ((token, -torch.inf) for token in stops)
    for word in metadata.bad_words_token_ids.get(row, ()):
        begin = word[:-1]
        if len(begin) <= len(said) and said[len(said) - len(begin) :] == begin:
            yield word[-1], -torch.inf


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """[n, L], with -1 behind the shorter ones."""
    width = max((len(row) for row in rows), default=0)
    made = torch.full((len(rows), width), -1, dtype=torch.int64, device="cpu")
    for i, row in enumerate(rows):
        made[i, : len(row)] = torch.tensor(row, dtype=torch.int64, device="cpu")
    return made.to(device)


def packed(allowed: Tensor) -> Tensor:
    """A bool mask [n, V] as 32 bits a word."""
    n, vocab = allowed.shape
    wide = torch.nn.functional.pad(allowed, (0, -vocab % 32)).view(n, -1, 32)
    bits = torch.ones(32, dtype=torch.int64, device=allowed.device) << torch.arange(32, device=allowed.device)
    return (wide * bits).sum(-1).to(torch.int32)  # the low 32 bits of the sum


def unpacked(mask: Tensor, vocab: int) -> Tensor:
    """The bools [n, vocab] of 32 bits a word."""
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab]
