"""``sample_linear`` over Triton: a library GEMM and the statistics of its tiles, or the fused kernels.

``algorithm="auto"`` is "tiled": no result file shows yet that the fused kernels are faster on some device.
"""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults
from rlkernel.drivers import sample_linear as driver
from rlkernel.triton_ops import sample_linear_fused as fused
from rlkernel.triton_ops import sampling as kernels


def unsupported(hidden: Tensor, weight: Tensor, *tensors: Tensor, **options: Any) -> list[str]:
    if options.pop("algorithm", "auto") != "fused":
        return driver.unsupported(kernels, hidden, weight, options)
    compute = options.get("compute_dtype") or torch.promote_types(hidden.dtype, weight.dtype)
    reasons = driver.unsupported(kernels, hidden, weight, options)
    if compute not in (torch.float16, torch.bfloat16):
        reasons.append("algorithm 'fused' needs float16 or bfloat16: tensor cores round float32 to TF32")
    if weight.stride(-1) != 1 and weight.shape[1] > 1:
        reasons.append(f"algorithm 'fused' needs dense rows of weight, got strides {weight.stride()}")
    return reasons


def forward(call: SampleLinearCall) -> SampleLinearResults:
    if call.algorithm == "fused":
        return fused.forward(call)
    return driver.forward(kernels, call)
