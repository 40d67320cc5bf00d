"""``linear_divergence`` over Triton: library GEMMs and the kernels of ``divergence``."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_divergence import LinearDivergenceCall, LinearDivergenceResults
from rlkernel.calls.linear_logprob import LinearGrads
from rlkernel.drivers import linear_divergence as driver
from rlkernel.triton_ops import divergence as kernels
from rlkernel.triton_ops._device import DTYPES, device_reasons, vocabulary_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = device_reasons(tensors[0]) + vocabulary_reasons(tensors[1].shape[0])
    for dtype in options.get("compute_dtypes", (x.dtype for x in tensors)):
        if dtype not in DTYPES:
            reasons.append(f"the products must be in float32, float16 or bfloat16, got {dtype}")
    return list(dict.fromkeys(reasons))


def forward(call: LinearDivergenceCall) -> LinearDivergenceResults:
    return driver.forward(kernels, call)


def backward(call: LinearDivergenceCall, results: LinearDivergenceResults, grad: Tensor) -> LinearGrads:
    return driver.backward(kernels, call, results, grad)
