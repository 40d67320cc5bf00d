"""TRL's helpers, which trainers of others call, too: logits to logprobs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._replacing import NARROW
from rlkernel.integrations._scored_logits import ScoredLogits
from rlkernel.ops import logprob as ops

Reason = str  # why a call is left to TRL
_looking: WeakSet[Callable[..., Any]] = WeakSet()  # the helpers that know scored logits
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


def looked_up_in(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """A helper of logits, which looks at what was scored already."""
    looking: dict[str, Callable[..., Any]] = {
        "selective_log_softmax": _selective_log_softmax,
        "entropy_from_logits": _entropy_from_logits,
        "selective_log_softmax_and_entropy": _selective_log_softmax_and_entropy,
    }
    look = looking[name]

    @functools.wraps(ours)
    def looked_up(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logits, ScoredLogits):
            return look(logits, *args, **kwargs)
        return ours(logits, *args, **kwargs)

    _looking.add(looked_up)
    return looked_up


def blind_helper(function: Callable[..., Any]) -> str | None:
    """Why what a trainer's function computes of logits is not looked up: its module has got a helper of
    somebody else since."""
    around = inspect.unwrap(function).__globals__
    for name in (ours.__name__ for ours in HELPERS):
        if name in around and around[name] not in _looking:
            return f"{around['__name__']}.{name} is somebody else's function"
    return None


# Rows under a mask have no label, and 0 already.


def _selective_log_softmax(
    logits: ScoredLogits, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    return logits.logprobs(index, temperature)


def _entropy_from_logits(logits: ScoredLogits, chunk_size: int = 128) -> Tensor:
    return logits.entropies()


def _selective_log_softmax_and_entropy(
    logits: ScoredLogits,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    entropies = logits.entropies(temperature)
    return logits.logprobs(index, temperature), entropies if entropy_requires_grad else entropies.detach()


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.long().masked_fill(row_mask == 0, SKIPPED)


def _logits_unsupported(
    logits: Tensor, index: Tensor | None = None, row_mask: Tensor | None = None
) -> Reason | None:
    if logits.dtype not in NARROW:
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
