"""The gradients of ``matmul`` over any backend's product."""

from typing import Protocol

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads


class Product(Protocol):
    """[B, M, K] with [B, K, N] of any strides, rounded once to ``dtype``."""

    def __call__(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor: ...


def gradients(call: MatmulCall, grad: Tensor, product: Product) -> MatmulGrads:
    a, b, bias, _, (need_a, need_b, need_bias) = call
    grad_b = None
    if need_b and b.stride(1) == 1:  # a transposed weight: so is its gradient, which is as dense as it
        grad_b = product(grad.mT, a, b.dtype).mT
    elif need_b:
        grad_b = product(a.mT, grad, b.dtype)
    grad_bias = None
    if need_bias and bias is not None:  # a product with ones, and so in its order
        rows = grad.reshape(1, grad.shape[0] * grad.shape[1], grad.shape[2])
        ones = torch.ones(1, 1, rows.shape[1], dtype=grad.dtype, device=grad.device)
        grad_bias = product(ones, rows, torch.float32)[0, 0].to(bias.dtype)
    return MatmulGrads(product(grad, b.mT, a.dtype) if need_a else None, grad_b, grad_bias)
