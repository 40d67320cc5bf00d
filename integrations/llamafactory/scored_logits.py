"""What stands where LLaMA-Factory's trainers expect logits, and what they compute of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._scored_logits import (
    COLUMNS,
    COMPUTED,
    LABEL,
    LOGPROB,
    MEAN_LOGIT,
    PASSING,
    ScoredLogits,
    Scores,
)
from rlkernel.integrations.hf.lm_head import IGNORED
from rlkernel.integrations.llamafactory import contract
from rlkernel.ops.logprob import logprob

FP32 = (torch.float32,)


class TheirLogits(ScoredLogits):
    """See ``ScoredLogits``."""

    passing = (*PASSING, "split")


class LogSoftmax(TheirLogits):
    """What ``log_softmax`` makes of them, of which labels' are gathered."""


def _to(logits: TheirLogits, *args: Any, **kwargs: Any) -> TheirLogits:
    if args != FP32 or kwargs:
        raise logits.scores.unknown(f"to(*{args}, **{kwargs})")
    return logits


def _float(logits: TheirLogits) -> TheirLogits:
    return logits


def _log_softmax(logits: TheirLogits, dim: int) -> LogSoftmax:
    if dim not in (-1, logits.dim() - 1):
        raise logits.scores.unknown(f"log_softmax(dim={dim})")
    return LogSoftmax.of(logits.as_subclass(torch.Tensor), logits.scores, logits.divided)


def _gather(logits: LogSoftmax, dim: int, index: Tensor) -> Tensor:
    """Of one label a row."""
    if dim not in (-1, logits.dim() - 1) or index.shape[-1] != 1:
        raise logits.scores.unknown(f"gather(dim={dim})")
    return logits.logprobs(index[..., 0])[..., None]


def _nansum(logits: TheirLogits) -> Tensor:
    """Of all logits."""
    head = logits.scores.head
    assert head is not None
    return logits.column(MEAN_LOGIT).nansum() * head.module.weight.shape[0]


TheirLogits.computed = {
    "mean": COMPUTED["mean"],
    "to": _to,
    "float": _float,
    "log_softmax": _log_softmax,
    "nansum": _nansum,
    "cross_entropy": COMPUTED["cross_entropy"],
}
LogSoftmax.computed = {"gather": _gather}


def of_logits(logits: Tensor, labels: Tensor, ignored: int) -> TheirLogits:
    """Of logits [B, T, V] that there are: the log-probabilities of the labels that follow."""
    labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)
    labels = labels.masked_fill(labels == ignored, IGNORED)
    found = logprob(logits, labels).logprobs
    values = [found.new_zeros(found.shape)] * COLUMNS
    values[LOGPROB], values[LABEL] = found, labels.to(found.dtype)
    return TheirLogits.of(torch.stack(values, -1), Scores(None, 1.0, (LOGPROB, LABEL), contract.FRAMEWORK))
