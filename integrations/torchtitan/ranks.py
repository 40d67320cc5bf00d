"""A vocabulary that ranks of tensor parallelism share out, by either of torchtitan's backends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import (
    current_spmd_mesh,
    set_current_spmd_mesh,
    spmd_mesh_size,
)
from torchtitan.distributed.utils import get_spmd_backend

TP = "tp"
WHOLE = "torchtitan's own ChunkedLossWrapper takes them"


def check_backend() -> None:
    """Raises:
    ValueError: it is ``full_dtensor``, of which hidden states and labels are parts.
    """
    if get_spmd_backend() == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend of FusedLoss must be 'spmd_types' or 'partial_dtensor', got "
            f"'full_dtensor': {WHOLE}"
        )


def check(hidden: Tensor, labels: Tensor) -> None:
    """Raises:
    ValueError: the tokens are shared out as ``full_dtensor`` does it.
    """
    if isinstance(labels, DTensor):
        raise ValueError(f"labels of FusedLoss must be plain tensors, got a DTensor: {WHOLE}")
    if isinstance(hidden, DTensor) and not all(place.is_replicate() for place in hidden.placements):
        raise ValueError(
            f"hidden states of FusedLoss must be whole on every rank, got {hidden.placements}: {WHOLE}"
        )


def local(module: Any, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The hidden states as a plain tensor, and which part of the vocabulary the lm_head has here.

    Every rank of ``linear_logprob`` gets the whole gradient of the hidden states.
    """
    if isinstance(hidden, DTensor):  # the weight is one, too, and tells its part itself
        return hidden.to_local(grad_placements=hidden.placements), {}
    count = spmd_mesh_size(TP)
    if count == 1:
        return hidden, {}
    mesh: Any = current_spmd_mesh()
    group, whole = mesh.get_group(TP), int(module.out_features)
    start = min(whole, -(-whole // count) * group.rank())
    return _Shared.apply(hidden, count), {"group": group, "vocab_start": start}


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """Inside, a loss takes its logits for those of the whole vocabulary, which they are."""
    if spmd_mesh_size(TP) == 1:
        yield
        return
    with set_current_spmd_mesh(None):
        yield


class _Shared(torch.autograd.Function):
    """Hidden states whose gradients torchtitan adds up over the ranks: each gives its share of the whole."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, count: int) -> Tensor:
        ctx.count = count
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.count, None
