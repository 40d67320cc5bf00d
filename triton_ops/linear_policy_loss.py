"""``linear_policy_loss`` over Triton: library GEMMs and the kernels of ``logprob``, or the fused ones."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall, LinearPolicyLossResults
from rlkernel.drivers import linear_policy_loss as driver
from rlkernel.triton_ops import linear_logprob, policy_loss
from rlkernel.triton_ops import logprob as kernels


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    algorithm = "fused" if options.get("algorithm") == "fused" else "tiled"
    return linear_logprob.unsupported(*tensors, **options | {"algorithm": algorithm})


def forward(call: LinearPolicyLossCall) -> LinearPolicyLossResults:
    return driver.forward(kernels, policy_loss, call, linear_logprob if call.algorithm == "fused" else None)
