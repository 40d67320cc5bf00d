"""``sample_linear`` over the compiled extension: a library GEMM, and the statistics of its tiles."""

from typing import Any

from torch import Tensor

from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults
from rlkernel.drivers import sample_linear as driver
from rlkernel.native import sampling as kernels


def unsupported(hidden: Tensor, weight: Tensor, *tensors: Tensor, **options: Any) -> list[str]:
    if options.pop("algorithm", "auto") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    return driver.unsupported(kernels, hidden, weight, options)


def forward(call: SampleLinearCall) -> SampleLinearResults:
    return driver.forward(kernels, call)
