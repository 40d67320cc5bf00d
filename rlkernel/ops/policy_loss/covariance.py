"""Which tokens clip_cov and kl_cov pick: by the batch's covariance of log-probability and advantage."""

from types import ModuleType

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.policy_loss import CovariancePick, PolicySelectCall, PolicySelectResults
from rlkernel.opaque import Op

Tensors = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]


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
    (chosen,) = op(PolicySelectCall(logprobs, old, advantages, mask, offsets, pick))
    return chosen


def _pick(call: PolicySelectCall) -> ModuleType:
    return dispatch.pick("policy_loss", call.logprobs, call.advantages, call.mask)


op = Op(
    "policy_loss_select",
    PolicySelectCall,
    PolicySelectResults,
    outputs=1,
    pick=_pick,
    forward=lambda impl, call: impl.select(call),
    like=lambda call: PolicySelectResults(torch.empty_like(call.mask)),
)
