"""TRL's helpers: logits to logprobs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl.contract import FLOATS
from rlkernel.ops import logprob as ops

Reason = str  # why a call is left to TRL
SKIPPED = torch.iinfo(torch.int64).min  # not -100: a negative index stays the error that it is


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor | Reason:
    several = row_mask is None and index.ndim == logits.ndim  # several tokens a row
    rows = index[..., 0] if several and index.shape[-1] else index
    if reason := _logits_unsupported(logits, rows, row_mask):
        return reason
    if several:
        return ops.selective_log_softmax(logits, index, temperature)
    index = _masked(index, row_mask)
    return ops.logprob(logits, index, temperature=temperature, ignore_index=SKIPPED).logprobs


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor | Reason:
    return _logits_unsupported(logits) or ops.entropy_from_logits(logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor] | Reason:
    if reason := _logits_unsupported(logits, index, row_mask):
        return reason
    index = _masked(index, row_mask)
    scores = ops.logprob(logits, index, temperature=temperature, ignore_index=SKIPPED, return_entropy=True)
    assert scores.entropy is not None
    return scores.logprobs, scores.entropy if entropy_requires_grad else scores.entropy.detach()


HELPERS = (selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy)


def helper(ours: Callable[..., Any], original: Callable[..., Any], patch: CountedPatch) -> Callable[..., Any]:
    """``ours``, and TRL's own function for what ours gives a reason against."""
    name = ours.__name__

    @functools.wraps(ours)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs)
        if isinstance(result, str):
            patch.left(name, result)
            return original(*args, **kwargs)
        patch.count(patch.calls, name)
        return result

    return counted


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.long().masked_fill(row_mask == 0, SKIPPED)


def _logits_unsupported(
    logits: Tensor, index: Tensor | None = None, row_mask: Tensor | None = None
) -> Reason | None:
    if logits.dtype not in FLOATS:
        return f"logits are {logits.dtype}"
    if logits.ndim < 2 or logits.shape[-1] == 0:
        return f"logits have shape {tuple(logits.shape)}"
    if index is not None and index.shape != logits.shape[:-1]:
        return "index has neither the rows of logits nor several entries for each"
    if index is not None and index.dtype not in (torch.int32, torch.int64):
        return f"index is {index.dtype}"
    if row_mask is not None and row_mask.shape != logits.shape[:-1]:
        return "row_mask does not have the rows of logits"
    return None
