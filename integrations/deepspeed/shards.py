"""A vocabulary that DeepSpeed's ranks share out, and what stands where one of its functions over it stood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._shards import shard


class Replacement:
    """In the place of one of DeepSpeed's autograd functions."""

    name = ""
    op = ""

    def __init__(self, original: Any, patch: CountedPatch) -> None:
        self.original, self.patch = original, patch
        self.__module__, self.__qualname__ = "rlkernel", self.op  # as a patch shows itself

    def left(self, reason: str | None) -> bool:
        """Whether the call is DeepSpeed's after all; counts it either way."""
        if reason is None:
            self.patch.count(self.patch.calls, self.name)
        else:
            self.patch.left(self.name, reason)
        return reason is not None


def shard_of(tp_group: Any, sizes: list[int]) -> dict[str, Any]:
    """Of the entries of each rank."""
    return shard(tp_group, sum(sizes[: tp_group.rank()]) if len(sizes) > 1 else 0)


def sizes(logits: Tensor, tp_group: Any) -> list[int]:
    """The entries of each rank: what has no targets names them nowhere."""
    if tp_group is None or tp_group.size() == 1:
        return [logits.shape[-1]]
    own = torch.tensor([logits.shape[-1]], device=logits.device)
    found = [torch.empty_like(own) for _ in range(tp_group.size())]
    torch.distributed.all_gather(found, own, group=tp_group)
    return [int(x) for x in found]
