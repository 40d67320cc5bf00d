"""TRL's helpers: logits to logprobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl.contract import FLOATS
from rlkernel.ops import logprob as ops

SKIPPED = torch.iinfo(torch.int64).min  # not -100: a negative index stays the error that it is


def _log_softmax_helper(original: Callable[..., Tensor], patch: CountedPatch) -> Callable[..., Tensor]:
    def selective_log_softmax(
        logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> Tensor:
        several = row_mask is None and index.ndim == logits.ndim  # several tokens a row
        rows = index[..., 0] if several and index.shape[-1] else index
        if reason := _logits_unsupported(logits, rows, row_mask):
            patch.left("selective_log_softmax", reason)
            return original(logits, index, temperature=temperature, row_mask=row_mask)
        patch.count(patch.calls, "selective_log_softmax")
        if several:
            return ops.selective_log_softmax(logits, index, temperature)
        index = _masked(index, row_mask)
        return ops.logprob(logits, index, temperature=temperature, ignore_index=SKIPPED).logprobs

    return _named(selective_log_softmax)


def _entropy_helper(original: Callable[..., Tensor], patch: CountedPatch) -> Callable[..., Tensor]:
    def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
        if reason := _logits_unsupported(logits):
            patch.left("entropy_from_logits", reason)
            return original(logits, chunk_size=chunk_size)
        patch.count(patch.calls, "entropy_from_logits")
        return ops.entropy_from_logits(logits)

    return _named(entropy_from_logits)


def _log_softmax_and_entropy_helper(
    original: Callable[..., tuple[Tensor, Tensor]], patch: CountedPatch
) -> Callable[..., tuple[Tensor, Tensor]]:
    def selective_log_softmax_and_entropy(
        logits: Tensor,
        index: Tensor,
        entropy_requires_grad: bool = True,
        temperature: float = 1.0,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if reason := _logits_unsupported(logits, index, row_mask):
            patch.left("selective_log_softmax_and_entropy", reason)
            return original(logits, index, entropy_requires_grad, temperature=temperature, row_mask=row_mask)
        patch.count(patch.calls, "selective_log_softmax_and_entropy")
        index = _masked(index, row_mask)
        scores = ops.logprob(
            logits, index, temperature=temperature, ignore_index=SKIPPED, return_entropy=True
        )
        assert scores.entropy is not None
        return scores.logprobs, scores.entropy if entropy_requires_grad else scores.entropy.detach()

    return _named(selective_log_softmax_and_entropy)


HELPERS: dict[str, Callable[[Any, CountedPatch], Callable[..., Any]]] = {
    "selective_log_softmax": _log_softmax_helper,
    "entropy_from_logits": _entropy_helper,
    "selective_log_softmax_and_entropy": _log_softmax_and_entropy_helper,
}


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__qualname__ = function.__name__  # not "<locals>": the patch shows it
    return function


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.long().masked_fill(row_mask == 0, SKIPPED)


def _logits_unsupported(
    logits: Tensor, index: Tensor | None = None, row_mask: Tensor | None = None
) -> str | None:
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
