"""A vocabulary that a framework's ranks share out, as rlkernel's ops are told of it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

IGNORED = -100
UNKNOWN = "the group of ranks is none that torch knows by its name"


def shard(group: Any, vocab_start: int) -> dict[str, Any]:
    """As ``logprob`` is told of it."""
    if group is None or group.size() == 1:
        return {}
    return {"group": group, "vocab_start": vocab_start}


def registered(group: Any) -> ProcessGroup | None:
    """The group as torch knows it by its name: slime's groups hold one, which they may make anew."""
    found = _named(group)
    if found is None:  # first: torch.compile does not trace a look for what torch's own groups lack
        found = _named(getattr(group, "group", None))
    return found


def _named(group: Any) -> ProcessGroup | None:
    if isinstance(group, ProcessGroup):
        with contextlib.suppress(RuntimeError):  # it has no name, or one that torch does not know
            if group.size() == 1 or distributed_c10d._resolve_process_group(group.group_name) is group:
                return group
    return None


def equal_shard(group: ProcessGroup, entries: int) -> dict[str, Any]:
    """The same where each rank has as many ``entries``, in the order of the ranks, as Megatron's have."""
    return shard(group, group.rank() * entries)


def targets_in(group: ProcessGroup, entries: int, ids: Tensor) -> Tensor:
    """``ids`` of the whole vocabulary; those outside, which mark padding, as what ``logprob`` ignores."""
    return torch.where((ids >= 0) & (ids < entries * group.size()), ids, IGNORED)
