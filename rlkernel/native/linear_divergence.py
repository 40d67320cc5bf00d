"""``linear_divergence`` over the compiled extension: library GEMMs and the kernels of ``divergence``."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_divergence import LinearDivergenceCall, LinearDivergenceResults
from rlkernel.calls.linear_logprob import LinearGrads
from rlkernel.drivers import linear_divergence as driver
from rlkernel.native import divergence, tensor_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    names = "hidden", "weight", "teacher_hidden", "teacher_weight"
    for name, tensor in zip(names, tensors, strict=True):
        if reasons := tensor_reasons(name, tensor):
            return reasons
    return [] if tensors[0].device.type == "cpu" else ["the kernel is one for CPUs"]


def forward(call: LinearDivergenceCall) -> LinearDivergenceResults:
    return driver.forward(divergence, call)


def backward(call: LinearDivergenceCall, results: LinearDivergenceResults, grad: Tensor) -> LinearGrads:
    return driver.backward(divergence, call, results, grad)
