"""``linear_logprob`` over Triton: library GEMMs with the kernels of ``logprob``, or the fused kernels.

``algorithm="auto"`` is "tiled": no result file shows yet that the fused kernels are faster on some device.
"""

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import RowGrads
from rlkernel.drivers import linear_logprob as driver
from rlkernel.triton_ops import linear_logprob_fused as fused
from rlkernel.triton_ops import logprob as kernels
from rlkernel.triton_ops._device import DTYPES, device_reasons, vocabulary_reasons


def unsupported(
    hidden: Tensor,
    weight: Tensor,
    *tensors: Tensor,
    compute_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    **options: object,
) -> list[str]:
    reasons = device_reasons(hidden) + vocabulary_reasons(weight.shape[0])
    compute_dtype = compute_dtype or torch.promote_types(hidden.dtype, weight.dtype)
    if compute_dtype not in DTYPES:
        reasons.append(f"the product must be in float32, float16 or bfloat16, got {compute_dtype}")
    if algorithm == "fused" and compute_dtype == torch.float32:
        reasons.append("algorithm 'fused' needs float16 or bfloat16: tensor cores round float32 to TF32")
    if algorithm == "fused" and weight.stride(-1) != 1 and weight.shape[1] > 1:
        reasons.append(f"algorithm 'fused' needs dense rows of weight, got strides {weight.stride()}")
    return reasons


def forward(call: LinearLogprobCall) -> LinearLogprobResults:
    return fused.forward(call) if call.algorithm == "fused" else driver.forward(kernels, call)


def backward(call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads) -> LinearGrads:
    if call.algorithm == "fused":
        return fused.backward(call, results, grads)
    return driver.backward(kernels, call, results, grads)
