"""``linear_policy_loss`` over Triton: library GEMMs and the kernels of ``logprob``."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall, LinearPolicyLossResults
from rlkernel.drivers import linear_policy_loss as driver
from rlkernel.triton_ops import linear_logprob, policy_loss
from rlkernel.triton_ops import logprob as kernels


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return linear_logprob.unsupported(*tensors, **options | {"algorithm": "tiled"})


def forward(call: LinearPolicyLossCall) -> LinearPolicyLossResults:
    return driver.forward(kernels, policy_loss, call)
