"""``matmul`` over the compiled extension: the CPU's kernel, whose chains of fp32 depend on K alone."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads, MatmulResults
from rlkernel.native import kernels, tensor_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    a = tensors[0]
    if a.device.type != "cpu":
        return [f"its compiled kernel is one for CPUs, got {a.device.type}"]
    return tensor_reasons("a", a)


def forward(call: MatmulCall) -> MatmulResults:
    return MatmulResults(_product(call.a, call.b, call.out_dtype, call.bias))


def backward(call: MatmulCall, results: MatmulResults, grad: Tensor) -> MatmulGrads:
    a, b, bias, _, (need_a, need_b, need_bias) = call
    grad_b = None
    if (
        need_b and b.stride(1) == 1
    ):  # a transposed weight: so is its gradient, which is as dense as the weight
        grad_b = _product(grad.mT, a, b.dtype).mT
    elif need_b:
        grad_b = _product(a.mT, grad, b.dtype)
    return MatmulGrads(
        _product(grad, b.mT, a.dtype) if need_a else None,
        grad_b,
        _sum_of_rows(grad).to(bias.dtype) if need_bias and bias is not None else None,
    )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Operands of any dtypes and strides, read where they are."""
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=dtype, device=a.device)
    bias = None if bias is None else bias.float().contiguous()
    kernels(a.device).matmul(a=a, b=b, bias=bias, out=out)
    return out


def _sum_of_rows(x: Tensor) -> Tensor:
    """[N] fp32 of [B, M, N]: a product with ones, and so in its order."""
    rows = x.reshape(1, x.shape[0] * x.shape[1], x.shape[2])
    return _product(torch.ones(1, 1, rows.shape[1], device=x.device), rows, torch.float32)[0, 0]
