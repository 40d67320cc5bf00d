"""``sample_linear`` over Triton: a library GEMM, and the statistics of its tiles."""

from typing import Any

from torch import Tensor

from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults
from rlkernel.drivers import sample_linear as driver
from rlkernel.triton_ops import sampling as kernels


def unsupported(hidden: Tensor, weight: Tensor, *tensors: Tensor, **options: Any) -> list[str]:
    return driver.unsupported(kernels, hidden, weight, options)


def forward(call: SampleLinearCall) -> SampleLinearResults:
    return driver.forward(kernels, call)
