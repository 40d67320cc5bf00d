"""Sums over the last dimension: a product with ones, and so in the order of ``rlkernel.matmul``; LayerNorm:
that of ``rlkernel.layer_norm``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.layer_norm import LayerNormCall, LayerNormResults
from rlkernel.consistency.aten_call import Refused, Short, is_exact, module_of, need_floats, put
from rlkernel.consistency.aten_products import product


def summed(x: Tensor, dim: Sequence[int] | None, keepdim: bool, mean: bool, dtype: torch.dtype) -> Tensor:
    """In fp32, rounded once."""
    rank, shape = x.dim(), x.shape
    dims = sorted(d % rank for d in dim) if dim and rank else list(range(rank))
    if dims == [rank - 1]:  # most sums are over rows as they are
        outer, length = shape[:-1], shape[-1]
        found = [*outer, 1] if keepdim else [*outer]
        rows = x.reshape(1, outer.numel(), length)
    else:
        kept = [d for d in range(rank) if d not in dims]
        count, length = math.prod(shape[d] for d in kept), math.prod(shape[d] for d in dims)
        found = [1 if d in dims else n for d, n in enumerate(shape)] if keepdim else [shape[d] for d in kept]
        rows = (x.permute(*kept, *dims) if kept and dims[0] < kept[-1] else x).reshape(1, count, length)
    # rows as the columns of the product are read where they are
    total = product(_ones(length, x.dtype, x.device), rows.mT, dtype=torch.float32)
    if mean:
        total.div_(length)
    return (total if dtype == torch.float32 else total.to(dtype)).view(found)


@functools.lru_cache(maxsize=16)
def _ones(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, 1, length, dtype=dtype, device=device)


def _is_no_dim(rank: int, dim: Sequence[int] | None) -> bool:
    """Outside of the dimensions, or one of them twice."""
    size, dims = max(rank, 1), dim or ()
    return any(not -size <= d < size for d in dims) or len({d % size for d in dims}) < len(dims)


def vector_norm(
    original: Callable[..., Tensor],
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **out: Any,
) -> Tensor:
    if ord in (math.inf, -math.inf, 0):  # a maximum, or a count
        return original(x, ord, dim, keepdim, dtype=dtype, **out)
    if ord not in (1, 2):
        raise Refused(f"its order must be 1, 2 or infinite, got {ord}")
    if _is_no_dim(x.dim(), dim):
        return original(x, ord, dim, keepdim, dtype=dtype, **out)  # an error
    need_floats(x, *(() if dtype is None else (torch.empty(0, dtype=dtype, device="cpu"),)))
    wide = x.float()
    total = summed(wide.abs() if ord == 1 else wide * wide, dim, keepdim, False, torch.float32)
    found = (total if ord == 1 else total.sqrt()).to(dtype or x.dtype)
    return put(out["out"], found) if out else found


def _reduction(mean: bool, into: bool) -> Callable[..., Tensor]:
    def run(
        original: Callable[..., Tensor],
        x: Tensor,
        dim: Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> Tensor:
        wanted = dtype or x.dtype
        exact = is_exact(x) if dtype is None else not (dtype.is_floating_point or dtype.is_complex)
        if exact or _is_no_dim(x.dim(), dim):  # torch's own sum of integers, or its error
            return original(x, dim, keepdim, dtype=dtype, **rest)
        x = x if x.dtype == wanted else x.to(wanted)  # before the sum, as torch does
        need_floats(x)
        found = summed(x, dim, keepdim, mean, wanted)
        return put(rest["out"], found) if into else found

    return run


def nansum(original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    x = x if is_exact(x) else x.masked_fill(x.isnan(), 0)
    return _reduction(mean=False, into="out" in kwargs)(original, x, *args, **kwargs)


def layer_norm(
    original: Callable[..., Any],
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """The rows, and of each its mean and 1 / deviation."""
    call = _layer_norm_of(x, shape, weight, bias, eps, (False, False, False))
    if call is None:
        found: tuple[Tensor, ...] = original(x, shape, weight, bias, eps)  # an error, or nothing
        return found
    normed, mean, rstd = module_of("layer_norm", call.x).forward(call)
    kept = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    return normed.view(x.shape), mean.view(kept), rstd.view(kept)


def layer_norm_backward(
    original: Callable[..., Any],
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    *kept_and_wanted: Any,
) -> tuple[Tensor | None, ...]:
    mean, rstd, weight, bias, wanted = kept_and_wanted
    call = _layer_norm_of(x, shape, weight, bias, 0.0, tuple(wanted))
    if call is None:
        found: tuple[Tensor | None, ...] = original(grad, x, shape, *kept_and_wanted)
        return found
    results = LayerNormResults(call.x, *(t.reshape(call.x.shape[:-1]) for t in (mean, rstd)))
    grads = module_of("layer_norm", call.x).backward(call, results, grad.reshape(call.x.shape))
    shapes = zip(grads, (x.shape, shape, shape), wanted, strict=True)
    return tuple(g.view(list(kept)) if g is not None and want else None for g, kept, want in shapes)


def _layer_norm_of(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    needs: tuple[bool, ...],
) -> LayerNormCall | None:
    """Of rows, over all the dimensions ``shape``; None of none."""
    if not x.numel() or list(shape) != list(x.shape[x.dim() - len(shape) :]):
        return None
    need_floats(x, *(t for t in (weight, bias) if t is not None))
    flat = x if len(shape) == 1 and x.dim() == 2 else x.reshape(-1, math.prod(shape))
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    scale, shift = (None if t is None else t.reshape(-1).contiguous() for t in (weight, bias))
    return LayerNormCall(flat, scale, shift, eps, True, needs)


SERVED: dict[str, Callable[..., Any]] = {
    "nansum": nansum,
    "nansum.out": nansum,
    "sum.dim_IntList": Short("row_sum", _reduction(mean=False, into=False)),
    "sum.IntList_out": _reduction(mean=False, into=True),
    "mean.dim": Short("row_mean", _reduction(mean=True, into=False)),
    "mean.out": _reduction(mean=True, into=True),
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "linalg_vector_norm": vector_norm,
    "linalg_vector_norm.out": vector_norm,
}
