"""``matmul`` over the compiled extension: the CPU's kernel, whose chains of fp32 depend on K alone."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads, MatmulResults
from rlkernel.drivers.matmul import gradients, summed
from rlkernel.native import kernels, tensor_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    a = tensors[0]
    if a.device.type != "cpu":
        return [f"its compiled kernel is one for CPUs, got {a.device.type}"]
    return tensor_reasons("a", a)


def forward(call: MatmulCall) -> MatmulResults:
    out = summed(_product, call.a, call.b, call.out_dtype, call.bias, call.segments)
    return MatmulResults(out)


def backward(call: MatmulCall, results: MatmulResults, grad: Tensor) -> MatmulGrads:
    return gradients(call, grad, _product)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Operands of any dtypes and strides, read where they are."""
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=dtype, device=a.device)
    bias = None if bias is None else bias.float().contiguous()
    kernels(a.device).matmul(a=a, b=b, bias=bias, out=out)
    return out
