"""Which tokens clip_cov and kl_cov pick: by the batch's covariance of log-probability and advantage."""

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.policy_loss import PolicySelectCall, PolicySelectResults
from rlkernel.opaque import Op


def selected(call: PolicySelectCall) -> Tensor:
    """``select`` of the backend that runs ``policy_loss`` on these tensors; without the tokens outside of
    their support.

    Raises:
        ValueError: the share is none.
    """
    if not 0 < call.pick.share <= 1:
        raise ValueError(f"cov_ratio must be in (0, 1], got {call.pick.share}")
    outside = call.logprobs.isneginf()
    if call.old_logprobs is not None:
        outside = outside | call.old_logprobs.isneginf()
    (chosen,) = op(call._replace(mask=call.mask & ~outside))
    return chosen


op = Op(
    "policy_loss_select",
    PolicySelectCall,
    PolicySelectResults,
    pick=lambda call: dispatch.pick("policy_loss", call.logprobs, call.advantages, call.mask),
    forward=lambda impl, call: impl.select(call),
    like=lambda call: PolicySelectResults(torch.empty_like(call.mask)),
)
