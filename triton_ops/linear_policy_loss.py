"""``linear_policy_loss`` over Triton: library GEMMs and the kernels of ``logprob``."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.drivers import linear_policy_loss as policy_tiles
from rlkernel.triton_ops import linear_logprob, policy_loss
from rlkernel.triton_ops import logprob as kernels
from rlkernel.types import LinearPolicy, LinearPolicyStats


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return linear_logprob.unsupported(*tensors, **options | {"algorithm": "tiled"})


def forward(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    policy: LinearPolicy,
    algorithm: str,
    needs: tuple[bool, bool, bool],
) -> LinearPolicyStats:
    return policy_tiles.forward(
        kernels, policy_loss, hidden, weight, target_ids, head, policy, algorithm, needs
    )
