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

EPSILON = 1e-5  # below which a temperature means the likeliest token

BUILT_IN = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)


class Adjusted(NamedTuple):
    """The logits that the token is drawn from, and the options that say the rest."""

    logits: Tensor
    options: dict[str, Any]


def adjusted(sampler: Any, logits: Tensor, metadata: Any, whole: bool) -> Adjusted:
    """Few tokens' biases, bans and penalties as options; as logits of their own where that cannot say it.

    ``whole`` asks for the latter.
    """
    n, device = logits.shape[0], logits.device
    options: dict[str, Any] = {"temperature": temperature(metadata)}
    for name in ("top_k", "top_p"):
        if (value := getattr(metadata, name)) is not None:
            options[name] = value[:n]
    invariant = metadata.logitsprocs.argmax_invariant
    if whole or not _sayable(metadata):
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
        options |= _options(metadata, n, device)
    for processor in invariant:
        if processor.min_p_count:
            options["min_p"] = processor.min_p_device[:n]
    return Adjusted(logits, options)


def temperature(metadata: Any) -> float | Tensor:
    t = metadata.temperature
    if metadata.all_greedy or t is None:
        return 0.0
    return t if metadata.all_random else torch.where(t < EPSILON, 0.0, t)


def _sayable(metadata: Any) -> bool:
    holder = metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        return False
    return all(
        type(each) in BUILT_IN and not _restores(each) and not _is_endless(each)
        for each in metadata.logitsprocs.all
    )


def _is_endless(processor: Any) -> bool:
    """Of a bias of inf or NaN, which an option would refuse, and with it end the engine for all requests."""
    return type(processor) is LogitBiasLogitsProcessor and not all(
        value < torch.inf for values in processor.biases.values() for value in values.values()
    )


def _restores(processor: Any) -> bool:
    """Of a structured output it gives back the end of the text where nothing else is left."""
    return type(processor) is MinTokensLogitsProcessor and any(x[3] for x in processor.min_toks.values())


def _options(metadata: Any, n: int, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {}
    rows: list[dict[int, float]] = [{} for _ in range(n)]
    for row, token, value in _biases(metadata):
        if row < n:
            rows[row][token] = rows[row].get(token, 0.0) + value
    if any(rows):
        options["logit_bias"] = rows
    if metadata.allowed_token_ids_mask is not None:
        options["token_bitmask"] = packed(~metadata.allowed_token_ids_mask[:n])
    if not metadata.no_penalties:
        options["penalties"] = rlkernel.Penalties(
            padded(metadata.output_token_ids[:n], device),
            metadata.prompt_token_ids[:n],
            repetition=metadata.repetition_penalties[:n],
            frequency=metadata.frequency_penalties[:n],
            presence=metadata.presence_penalties[:n],
        )
    return options


def _biases(metadata: Any) -> Iterator[tuple[int, int, float]]:
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if type(processor) is LogitBiasLogitsProcessor:
            for row, values in processor.biases.items():
                yield from ((row, token, value) for token, value in values.items())
        else:
            for row, (_, _, stops, _) in processor.min_toks.items():
                yield from ((row, token, -torch.inf) for token in stops)
    for row, words in metadata.bad_words_token_ids.items():
        said = metadata.output_token_ids[row]
        for word in words:
            begin = word[:-1]
            if len(begin) <= len(said) and said[len(said) - len(begin) :] == begin:
                yield row, word[-1], -torch.inf


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """[n, L], with -1 behind the shorter ones."""
    width = max((len(row) for row in rows), default=0)
    made = torch.full((len(rows), width), -1, dtype=torch.int64)
    for i, row in enumerate(rows):
        made[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return made.to(device)


def packed(allowed: Tensor) -> Tensor:
    """A bool mask [n, V] as 32 bits a word."""
    n, vocab = allowed.shape
    wide = torch.nn.functional.pad(allowed, (0, -vocab % 32)).view(n, -1, 32)
    bits = torch.ones(32, dtype=torch.int64, device=allowed.device) << torch.arange(32, device=allowed.device)
    return (wide * bits).sum(-1).to(torch.int32)  # the low 32 bits of the sum
