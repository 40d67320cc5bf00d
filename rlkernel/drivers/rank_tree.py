"""A sum over the ranks of a group, of which each holds a node of one tree."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.drivers.matmul import tree

SEGMENTS = 8  # the leaves of the tree of every sum that ranks may share out


def segments_of(size: int) -> int:
    """Of a sum that one rank has whole; one that cannot be cut so is no tree."""
    return SEGMENTS if size % SEGMENTS == 0 else 1


def summed(node: Tensor, dtype: torch.dtype, group: Any) -> Tensor:
    """``(n0 + n1) + (n2 + n3)`` of the ranks' nodes, in this order on every rank, rounded once to ``dtype``.

    Each rank adds up one part of the elements, and all gather the parts: a rank sends ``R - 1`` of ``R``
    parts of its node and as much of the rounded sum.  A library's own reduction has an order of its own.
    """
    ranks = dist.get_world_size(group) if group is not None else 1
    if ranks == 1:
        return node.to(dtype)
    part = -(-node.numel() // ranks)
    sent = torch.nn.functional.pad(node.reshape(-1), (0, part * ranks - node.numel()))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    total = tree(received.view(ranks, part)).to(dtype)
    return gathered(total, group).view(-1)[: node.numel()].view(node.shape)


def folded(nodes: Iterable[Tensor | None]) -> Tensor | None:
    """``tree`` of nodes as they come, a power of two of them, of which few are kept; None of None."""
    held: list[tuple[int, Tensor]] = []
    for node in nodes:
        if node is None:
            continue
        count = 1
        while held and held[-1][0] == count:
            node, count = held.pop()[1].add_(node), 2 * count
        held.append((count, node))
    return held[0][1] if held else None


def bytes_of(x: Tensor) -> Tensor:
    """The elements [..., n] as they are, side by side: not every library sends every dtype."""
    x = x.contiguous()
    # without a row, or of one element, contiguous() lets the last stride be
    return (x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def gathered(x: Tensor, group: Any) -> Tensor:
    """[R, ...] of what the ranks have."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.numel())
    # torch 2.13 gave it another name, and warns of the old one
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, x.reshape(-1), group=group)
    return out.view(ranks, *x.shape)
