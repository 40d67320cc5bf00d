"""What a layer computes by several of torch's operations, in one kernel of a CPU and without a gradient.

The bits are those that the operations have inside ``rlkernel.batch_invariant(level="batch")``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel import native
from rlkernel.native._rows import dense_like, rows_of
from rlkernel.runtime import invariance

CPU = torch.device("cpu")


def takes(x: Tensor, *others: Tensor) -> bool:
    """Whether kernels here read ``x`` and others of its dtype."""
    return x.dtype in native.DTYPES and x.is_cpu and {other.dtype for other in others} <= {x.dtype}


def serves(*tensors: Tensor) -> bool:
    """Whether a kernel here has the bits that torch's operations have now."""
    settings = invariance.settings
    return bool(settings) and settings[-1].level == "batch" and takes(*tensors)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``weight * (h * rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)`` with h in fp32, or rounded
    behind the weight; of ``h = x + residual``, which is the second result."""
    normed = dense_like(x)
    summed = None if residual is None else dense_like(x)
    native.kernels(CPU).rms_norm_in_order(
        x=rows_of(x), residual=rows_of(residual), summed=summed, weight=weight, weight_offset=weight_offset,
        eps=eps, round_first=round_first, normed=normed,
    )  # fmt: skip
    return normed, summed


def gated(packed: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of [..., 2 N], each rounded."""
    gate, up = packed.chunk(2, -1)
    product = dense_like(gate)
    native.kernels(CPU).swiglu_forward(
        gate=rows_of(gate), up=rows_of(up), activation=activation, round_first=True, product=product
    )
    return product


def turn(q: Tensor, k: Tensor | None, table: Tensor, positions: Tensor, interleaved: bool) -> None:
    """Rotary embedding in place of [T, heads, D], products rounded; ``table`` has cosines and then sines."""
    cos, sin = table.chunk(2, -1)
    native.kernels(CPU).rotary(
        q=q, k=k, cos=cos, sin=sin, positions=positions, heads=1, rotary_dim=table.shape[1],
        interleaved=interleaved, round_each=True, inverse=False, out_q=q, out_k=k,
    )  # fmt: skip


class Linear:
    """``torch.nn.functional.linear``, which does not look anew at the weights of the call before."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, int, Tensor | None] | None = None
        self._columns = torch.empty(0, dtype=torch.float32, device="cpu")
        self._bias: Tensor | None = None
        self._product = native.short_way("product")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen = self._seen
        if seen is None or seen[0] is not weight or seen[1] != weight.data_ptr() or seen[2] is not bias:
            # as a layer of vLLM has them, of classes that answer some operations themselves
            self._columns = weight.detach().as_subclass(Tensor).t()
            self._bias = None if bias is None else bias.detach().as_subclass(Tensor)
            self._seen = weight, weight.data_ptr(), bias
        found: Tensor | None = self._product((x, self._columns, self._bias), {})
        return self._long_way(x) if found is None else found

    def _long_way(self, x: Tensor) -> Tensor:
        """Of rows of any shape, or none of them."""
        columns = self._columns.unsqueeze(0)
        rows = x.reshape(1, -1, x.shape[-1])
        out = x.new_empty(1, rows.shape[1], columns.shape[2])
        bias = None if self._bias is None else self._bias.float()
        native.kernels(CPU).matmul(a=rows, b=columns, bias=bias, out=out)
        return out.view(*x.shape[:-1], columns.shape[2])
