"""Over any backend's product: sums that are a tree over segments of K, and the gradients of ``matmul``."""

from typing import Protocol

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads

# numbers of a block's nodes: on a CPU they stay in the caches, on a GPU they fill it
CPU_NODES, GPU_NODES = 2**20, 2**26
CPU_ROWS, GPU_ROWS = 128, 4096


class Product(Protocol):
    """[B, M, K] with [B, K, N] of any strides, rounded once to ``dtype``."""

    def __call__(self, a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor: ...


def summed(
    product: Product,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    segments: int = 1,
) -> Tensor:
    """The product, of which a sum is a tree: its leaves are the sums of equal segments of K, in fp32.

    Blocks of rows and columns bound the memory of the leaves; no bit shows them.
    """
    if segments == 1:
        return product(a, b, dtype, bias)
    (batch, rows, inner), columns = a.shape, b.shape[2]
    out = torch.empty(batch, rows, columns, dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    bias = None if bias is None else bias.float()
    nodes, most = (CPU_NODES, CPU_ROWS) if a.device.type == "cpu" else (GPU_NODES, GPU_ROWS)
    high = min(rows, most)
    wide = max(nodes // (segments * high), 1)
    for z in range(batch):
        left = a[z].unflatten(1, (segments, inner // segments)).transpose(0, 1)
        right = b[z].unflatten(0, (segments, inner // segments))
        for j in range(0, columns, wide):
            for i in range(0, rows, high):
                here = slice(i, i + high), slice(j, j + wide)
                leaves = product(left[:, here[0]], right[:, :, here[1]], torch.float32)
                total = tree(leaves)
                out[z][here] = total if bias is None else total.add_(bias[here[1]])
    return out


def tree(nodes: Tensor) -> Tensor:
    """``((n0 + n1) + (n2 + n3)) + ...`` of [S, ...] for a power of two S; ``nodes`` is written over."""
    while len(nodes) > 1:
        nodes[::2] += nodes[1::2]
        nodes = nodes[::2]
    return nodes[0]


def gradients(call: MatmulCall, grad: Tensor, product: Product) -> MatmulGrads:
    a, b, bias = call.a, call.b, call.bias
    need_a, need_b, need_bias = call.needs
    grad_a = summed(product, grad, b.mT, a.dtype, segments=call.grad_segments) if need_a else None
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
    return MatmulGrads(grad_a, grad_b, grad_bias)
