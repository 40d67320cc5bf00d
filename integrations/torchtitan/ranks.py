"""Tensor parallelism, in which ranks have the same hidden states and each a part of the vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import spmd_mesh_size

INSTEAD = "torchtitan's own ChunkedLossWrapper takes it"


def check(hidden: Tensor, labels: Tensor) -> None:
    """Raises:
    ValueError: the tokens are shared out as ``full_dtensor`` does it, or the lm_head as ``spmd_types`` does.
    """
    if isinstance(labels, DTensor):
        raise ValueError(f"labels of FusedLoss must be plain tensors, got a DTensor: {INSTEAD}")
    if isinstance(hidden, DTensor) and not all(place.is_replicate() for place in hidden.placements):
        raise ValueError(
            f"hidden states of FusedLoss must be whole on every rank, got {hidden.placements}: {INSTEAD}"
        )
    if spmd_mesh_size("tp") > 1:
        raise ValueError(
            "the lm_head of FusedLoss must be whole, or shared out as DTensors "
            f"(parallelism.spmd_backend='partial_dtensor'), got parts by 'spmd_types': {INSTEAD}"
        )


def local(hidden: Tensor) -> Tensor:
    """As a plain tensor; the lm_head's weight is a DTensor, too, and tells ``linear_logprob`` its part."""
    if isinstance(hidden, DTensor):  # of whose gradient every rank gets the whole
        return hidden.to_local(grad_placements=hidden.placements)
    return hidden
