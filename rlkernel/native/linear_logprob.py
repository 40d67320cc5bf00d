"""``linear_logprob`` over the compiled extension: a library GEMM and a kernel of ``logprob`` per tile."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import RowGrads
from rlkernel.drivers import linear_logprob as driver
from rlkernel.native import logprob, tensor_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    hidden, weight = tensors[:2]
    reasons = tensor_reasons("hidden", hidden)
    if "input_scheme" not in options:
        reasons += tensor_reasons("weight", weight)
    elif options["input_scheme"] and hidden.device.type != "cpu":
        reasons.append("the product of FP8 with FP8 on a GPU is a Triton kernel")
    return list(dict.fromkeys(reasons))


def forward(call: LinearLogprobCall) -> LinearLogprobResults:
    return driver.forward(logprob, call)


def backward(call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads) -> LinearGrads:
    return driver.backward(logprob, call, results, grads)
