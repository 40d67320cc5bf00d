"""``sample_linear`` over Triton: a library GEMM, and the statistics of its tiles."""

from typing import Any

from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sampling import SampleStats, Sampling
from rlkernel.drivers import sample_linear as sampling_tiles
from rlkernel.triton_ops import sampling as kernels


def unsupported(hidden: Tensor, weight: Tensor, *tensors: Tensor, **options: Any) -> list[str]:
    return sampling_tiles.unsupported(kernels, hidden, weight, options)


def forward(
    hidden: Tensor, weight: Tensor, head: Head, sampling: Sampling, logits: Tensor | None
) -> SampleStats:
    return sampling_tiles.forward(kernels, hidden, weight, head, sampling, logits)


def product(hidden: Tensor, weight: Tensor, head: Head, logits: Tensor) -> None:
    sampling_tiles.product(hidden, weight, head, logits)
