"""Which tokens clip_cov and kl_cov pick: by the batch's covariance of log-probability and advantage."""

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.types import CovariancePick

Tensors = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]  # the first arguments of ``select``


def selected(tensors: Tensors, pick: CovariancePick) -> Tensor:
    """``select`` of the backend that runs ``policy_loss`` on these tensors; without the tokens outside of
    their support.

    Raises:
        ValueError: the share is none.
    """
    if not 0 < pick.share <= 1:
        raise ValueError(f"cov_ratio must be in (0, 1], got {pick.share}")
    logprobs, old, advantages, mask, offsets = tensors
    mask = mask & ~(logprobs.isneginf() if old is None else logprobs.isneginf() | old.isneginf())
    if torch.compiler.is_compiling():
        return _op(logprobs, old, advantages, mask, offsets, *pick)
    return _select(logprobs, old, advantages, mask, offsets, pick)


def _select(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    pick: CovariancePick,
) -> Tensor:
    impl = dispatch.pick("policy_loss", logprobs, advantages, mask)
    chosen: Tensor = impl.select(logprobs, old_logprobs, advantages, mask, cu_seqlens, pick)
    return chosen


@torch.library.custom_op("rlkernel::policy_loss_select", mutates_args=())
def _op(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    by_hash: bool,
    share: float,
    cov_low: float,
    cov_high: float,
    low: float,
    high: float,
    seed: int,
) -> Tensor:
    pick = CovariancePick(by_hash, share, cov_low, cov_high, low, high, seed)
    return _select(logprobs, old_logprobs, advantages, mask, cu_seqlens, pick)


@_op.register_fake
def _op_fake(logprobs, old_logprobs, advantages, mask, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(mask)
