"""``linear_logprob`` over Triton: library GEMMs with the kernels of ``logprob``, or the fused kernels.

``algorithm="auto"`` is "tiled", whose bits are those of ``linear_policy_loss`` in one pass; on an H200 the
fused kernels are faster forward alone.
"""

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import RowGrads
from rlkernel.drivers import linear_logprob as driver
from rlkernel.triton_ops import linear_logprob_fp8 as fp8
from rlkernel.triton_ops import linear_logprob_fused as fused
from rlkernel.triton_ops import logprob as kernels
from rlkernel.triton_ops._device import DTYPES, device_reasons, vocabulary_reasons


def unsupported(
    hidden: Tensor,
    weight: Tensor,
    *tensors: Tensor,
    compute_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    input_scheme: str | None = None,
    steps: tuple[int, ...] = (),
    **options: object,
) -> list[str]:
    reasons = device_reasons(hidden) + vocabulary_reasons(weight.shape[0])
    if input_scheme is not None:
        reasons += ["algorithm 'fused' takes no FP8 weight"] if algorithm == "fused" else []
        reasons += fp8.reasons(weight.shape[1], steps) if input_scheme else []
    compute_dtype = compute_dtype or torch.promote_types(hidden.dtype, weight.dtype)
    if compute_dtype not in DTYPES:
        reasons.append(f"the product must be in float32, float16 or bfloat16, got {compute_dtype}")
    if algorithm == "fused" and compute_dtype == torch.float32:
        reasons.append("algorithm 'fused' needs float16 or bfloat16: tensor cores round float32 to TF32")
    if algorithm == "fused" and weight.stride(-1) != 1 and weight.shape[1] > 1:
        reasons.append(f"algorithm 'fused' needs dense rows of weight, got strides {weight.stride()}")
    return reasons


def forward(call: LinearLogprobCall) -> LinearLogprobResults:
    if call.algorithm == "fused":
        return fused.forward(call)
    return driver.forward(kernels, call, fp8.multiply if call.input_scheme else None)


def backward(call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads) -> LinearGrads:
    if call.algorithm == "fused":
        return fused.backward(call, results, grads)
    return driver.backward(kernels, call, results, grads, fp8.multiply if call.input_scheme else None)
