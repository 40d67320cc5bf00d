"""Matrix products over ``rlkernel.matmul``, whose chains depend on the reduced dimension alone."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall
from rlkernel.consistency.aten_call import Refused, is_exact, module_of, need_floats, put, used


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """[..., M, K] with [..., K, N] of one dtype: rounded once, with ``bias`` [N] before."""
    need_floats(a, b)
    used.backend, module = _backend(a.dtype, a.device)
    if a.dim() == 3:
        return module.forward(MatmulCall(a, b, bias, dtype or a.dtype)).out
    return module.forward(MatmulCall(a.unsqueeze(0), b.unsqueeze(0), bias, dtype or a.dtype)).out.squeeze(0)


@functools.lru_cache
def _backend(dtype: torch.dtype, device: torch.device) -> tuple[str, ModuleType]:
    """The same for all products of these: to ask anew takes as long as a small one."""
    module = module_of("matmul", torch.empty(0, dtype=dtype, device=device))
    return used.backend, module


def added(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``beta * base + alpha * (a @ b)``, rounded once."""
    columns = b.shape[-1]
    if beta == 1 and alpha == 1 and base.dim() == 1 and base.shape[0] == columns:
        return product(a, b, base, dtype)
    found = product(a, b, dtype=torch.float32)
    if alpha != 1:
        found.mul_(alpha)
    if beta != 0:  # what stands in base is else not read
        base = base.float()
        found = found + (base if beta == 1 else base * beta)
    return found.to(dtype or a.dtype)


def mm(original: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    return original(a, b) if is_exact(a) else product(a, b)


def mm_out(original: Callable[..., Tensor], a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return original(a, b, out=out) if is_exact(a) else put(out, product(a, b))


def addmm(original: Callable[..., Tensor], base: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    return original(base, a, b, **factors) if is_exact(a) else added(base, a, b, **factors)


def addmm_out(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **factors: Any
) -> Tensor:
    if is_exact(a):
        return original(base, a, b, out=out, **factors)
    return put(out, added(base, a, b, **factors))


def addmm_in_place(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, b: Tensor, **factors: Any
) -> Tensor:
    return original(base, a, b, **factors) if is_exact(a) else base.copy_(added(base, a, b, **factors))


def addmv(original: Callable[..., Tensor], base: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Tensor:
    if is_exact(a):
        return original(base, a, x, **factors)
    return added(base.unsqueeze(-1), a, x[:, None], **factors)[:, 0]


def addmv_out(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, x: Tensor, *, out: Tensor, **factors: Any
) -> Tensor:
    if is_exact(a):
        return original(base, a, x, out=out, **factors)
    return put(out, added(base.unsqueeze(-1), a, x[:, None], **factors)[:, 0])


def addmv_in_place(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, x: Tensor, **factors: Any
) -> Tensor:
    if is_exact(a):
        return original(base, a, x, **factors)
    return base.copy_(added(base.unsqueeze(-1), a, x[:, None], **factors)[:, 0])


def dot(original: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return original(x, y) if is_exact(x) else product(x[None], y[:, None])[0, 0]


def mm_to(original: Callable[..., Tensor], a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return product(a, b, dtype=dtype)


def mm_to_out(
    original: Callable[..., Tensor], a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor
) -> Tensor:
    return put(out, product(a, b, dtype=dtype))


def addmm_to(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **rest: Any
) -> Tensor:
    out = rest.pop("out", None)
    found = added(base, a, b, dtype=dtype, **rest)
    return found if out is None else put(out, found)


def grouped_mm(
    original: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One product for each group, whose elements [offs[g - 1], offs[g]) are rows of ``a`` [T, K], columns of
    ``b`` [K, T] or, where both have two dimensions, what is summed over.  Rows behind the last group are 0.
    """
    if bias is not None:
        raise Refused("torch has no bias there")
    dtype = out_dtype or a.dtype
    if offs is None:
        return product(a, b, dtype=dtype)
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends, strict=False))
    if a.dim() == b.dim() == 2:
        return torch.stack([product(a[:, first:end], b[first:end], dtype=dtype) for first, end in groups])
    out = a.new_zeros(a.shape[-2], b.shape[-1], dtype=dtype)
    for g, (first, end) in enumerate(groups):
        if a.dim() == 2:
            out[first:end] = product(a[first:end], b[g], dtype=dtype)
        else:
            out[:, first:end] = product(a[g], b[:, first:end], dtype=dtype)
    return out


SERVED: dict[str, Callable[..., Any]] = {
    "_grouped_mm": grouped_mm,
    "mm.dtype": mm_to,
    "mm.dtype_out": mm_to_out,
    "bmm.dtype": mm_to,
    "bmm.dtype_out": mm_to_out,
    "addmm.dtype": addmm_to,
    "addmm.dtype_out": addmm_to,
    "baddbmm.dtype": addmm_to,
    "baddbmm.dtype_out": addmm_to,
    "mm": mm,
    "mm.out": mm_out,
    "bmm": mm,
    "bmm.out": mm_out,
    "addmm": addmm,
    "addmm.out": addmm_out,
    "addmm_": addmm_in_place,
    "baddbmm": addmm,
    "baddbmm.out": addmm_out,
    "baddbmm_": addmm_in_place,
    "addmv": addmv,
    "addmv.out": addmv_out,
    "addmv_": addmv_in_place,
    "dot": dot,
    "vdot": dot,
}
