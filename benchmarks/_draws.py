"""What judges a sampler's answers: the reference's for the same seeds, and how often each token comes."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import rlkernel

DRAWS = 400  # of one row: few enough for an interpreter
VOCAB = 40
_EXACT = ("token_ids", "valid", "kept_count", "rank")
_CLOSE = ("kept_mass", "processed_logprobs", "entropy")


def different(got: Mapping[str, Tensor], logits: Tensor, options: Mapping[str, Any]) -> list[str]:
    """What is not the reference's, which samples these ``logits`` [B, V] in fp64 by the same seeds.

    Two tokens may change places where their logits, or what is kept up to them, differ by a rounding: in one
    row of 32.  Probabilities are compared where the rows keep as many tokens.
    """
    with rlkernel.use_backend("reference"):
        want = rlkernel.sample(logits.double(), **options)._asdict()
    rows = logits.shape[0]
    problems = []
    for name in _EXACT:
        if (asked := want[name]) is None or name not in got:
            continue
        others = int((got[name].long() != asked.long()).sum())
        if others > rows // 32:
            problems.append(f"{name}: the reference's is another one in {others} of {rows} rows")
    same = (got["kept_count"] == want["kept_count"]) & (got["token_ids"] == want["token_ids"])
    for name in _CLOSE:
        if (asked := want[name]) is None or name not in got:
            continue
        a, b = got[name][same].double(), asked[same].double()
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True):
            problems.append(f"{name}: {(a - b).abs().max().item():.2e} from the reference's")
    return problems


def unlikely(draw: Callable[[Tensor], Tensor], logits: Tensor, options: Mapping[str, Any]) -> list[str]:
    """Whether tokens come as often as they should, by chi-square: ``draw(seeds)`` of a row's ``logits`` [V].

    A true sampler fails once in a million runs, and its seeds are always the same.  Not for interpreted
    kernels, which take a second for few rows: their tokens are the reference's, or ``different`` says so.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return []
    with rlkernel.use_backend("reference"):
        every = torch.arange(len(logits), device=logits.device)
        row = logits.double().expand(len(every), -1)
        scored = rlkernel.score_tokens(row, every, **options).processed_logprobs
    assert scored is not None
    tokens = draw(torch.arange(DRAWS, device=logits.device))
    seen = torch.bincount(tokens.long().clamp(0, len(every)), minlength=len(every) + 1).double()
    expected = torch.nn.functional.pad(scored.exp(), (0, 1)) * DRAWS
    if outside := int(seen[expected == 0].sum()):
        return [f"token_ids: {outside} of {DRAWS} draws are outside of what the filters keep"]
    rare = expected < 5
    bins = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, expected)]
    deviation = torch.where(bins[1] > 0, (bins[0] - bins[1]).square() / bins[1], 0).sum().item()
    if deviation > (limit := _quantile(int((bins[1] > 0).sum()) - 1)):
        return [f"token_ids: chi-square of {DRAWS} draws is {deviation:.0f}, must be below {limit:.0f}"]
    return []


def _quantile(freedom: int) -> float:
    """Which chi-square exceeds once in a million times, by Wilson and Hilferty's cube."""
    if freedom < 1:
        return math.inf
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.75 * math.sqrt(part)) ** 3
