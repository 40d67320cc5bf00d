"""A choice of experts, and the sum of what they gave, whose bits depend on the token alone."""

import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row and their places, the largest first; of equal ones the lowest place.

    Equal to ``torch.topk`` where no two scores of a row are equal; ``torch.topk`` says nothing of those.

    Args:
        scores: ``[..., E]``.
        k: how many.

    Returns:
        values ``[..., k]``, differentiable, and indices ``[..., k]``.

    Examples:
        >>> rlkernel.routing_replay.top_k(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), 2)
        (tensor([[3., 3.]]), tensor([[1, 2]]))
    """
    if not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"k must be in [1, {scores.shape[-1]}], got {k}")
    with torch.no_grad():
        indices = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    return scores.gather(-1, indices), indices


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the experts of each token gave, in the order of their slots.

    Equal to ``(outputs * weights[..., None]).sum(-2)``, in fp32 (fp64 for fp64), from slot 0 to slot k - 1,
    rounded once.  Elementwise operations alone: a token's bits do not depend on the other tokens.

    Args:
        outputs: ``[..., k, H]``.
        weights: ``[..., k]``.

    Returns:
        ``[..., H]`` in ``outputs``' dtype.

    Examples:
        >>> outputs, weights = torch.ones(1, 2, 3), torch.tensor([[0.75, 0.5]])
        >>> rlkernel.routing_replay.combine(outputs, weights)
        tensor([[1.2500, 1.2500, 1.2500]])
    """
    if outputs.shape[:-1] != weights.shape or not weights.shape[-1]:
        raise ValueError(
            f"weights must have outputs' shape {tuple(outputs.shape[:-1])} without H, "
            f"got {tuple(weights.shape)}"
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    total = outputs[..., 0, :].to(dtype) * weights[..., 0, None].to(dtype)
    for slot in range(1, weights.shape[-1]):
        total = total + outputs[..., slot, :].to(dtype) * weights[..., slot, None].to(dtype)
    return total.to(outputs.dtype)
