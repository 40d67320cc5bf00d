"""A vocabulary that a framework's ranks share out, as rlkernel's ops are told of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def shard(group: Any, vocab_start: int) -> dict[str, Any]:
    """As ``logprob`` is told of it."""
    if group is None or group.size() == 1:
        return {}
    return {"group": group, "vocab_start": vocab_start}


def equal_shard(group: Any, entries: int) -> dict[str, Any]:
    """The same where each rank has as many ``entries``, in the order of the ranks, as Megatron's have."""
    return {} if group.size() == 1 else shard(group, group.rank() * entries)


def targets_in(group: Any, entries: int, ids: Tensor) -> Tensor:
    """``ids`` of the whole vocabulary; those outside, which mark padding, as what ``logprob`` ignores."""
    return torch.where((ids >= 0) & (ids < entries * group.size()), ids, IGNORED)
