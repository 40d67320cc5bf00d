"""Whether a model's bits are those of its rollouts, tried out on a tiny batch when a trainer is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel.integrations.hf.models import behind

LENGTHS = (7, 4)


def tried(model: Any, temperature: float, cached: bool) -> str:
    """What a model must have and has not; empty where two samples have the same bits in every way.

    Each alone, both padded on the left, through TRL's fused head and, where ``cached``, token by token behind
    a cache, all in evaluation mode under the strict mode.
    """
    device = model.device
    vocab = model.config.get_text_config().vocab_size
    samples = [
        torch.tensor([vocab // 4 + (7 * i + 3 * n) % max(vocab // 2, 1) for i in range(n)], device=device)
        for n in LENGTHS
    ]
    try:
        with _evaluated(model), torch.no_grad(), rlkernel.batch_invariant():
            return _differing(model, samples, temperature, cached)
    except Exception as error:  # whatever code of others makes of a tiny batch, and what the mode refuses
        message = str(error).partition("\n")[0]
        return f"operations that batch_invariant serves, got {type(error).__name__}: {message}"


def _differing(model: Any, samples: list[Tensor], temperature: float, cached: bool) -> str:
    alone = [model(input_ids=x[None], position_ids=_count(x)[None]).logits[0] for x in samples]
    ids, mask = _padded(samples)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    padded = model(**given).logits
    if not all(torch.equal(row[-len(x) :], x) for row, x in zip(padded, alone, strict=True)):
        return "the same logits alone and in a padded batch, got others: it mixes rows, or reads their places"
    scores = model(**given, labels=ids.masked_fill(mask == 0, -100), fused_lm_head=True).log_probs
    for row, x, logits in zip(scores, samples, alone, strict=True):
        want = rlkernel.logprob(logits[:-1], x[1:], temperature=temperature).logprobs
        if not torch.equal(row[1 - len(x) :], want):
            return "a head whose fused log-probabilities are those of its logits, got others"
    if cached and not all(torch.equal(_stepped(model, x), y) for x, y in zip(samples, alone, strict=True)):
        return "the same logits behind a cache, got others"
    return ""


def _stepped(model: Any, x: Tensor) -> Tensor:
    """The logits of a prefill without the last two tokens, and of each of these behind the cache."""
    cuts = [x[:-2], x[-2:-1], x[-1:]]
    cache, found = None, []
    for part in cuts:
        given = behind(model, cache)
        out = model(input_ids=part[None], use_cache=True, **given)
        (cache,) = (out[name] for name in given)
        found.append(out.logits[0])
    return torch.cat(found)


def _padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(map(len, samples))
    ids, mask = (samples[0].new_zeros(len(samples), width) for _ in range(2))
    for i, x in enumerate(samples):
        ids[i, width - len(x) :], mask[i, width - len(x) :] = x, 1
    return ids, mask


def _count(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


@contextlib.contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
