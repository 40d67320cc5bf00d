"""Matrix products over ``rlkernel.matmul``, whose chains depend on the reduced dimension alone."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.matmul import MatmulCall
from rlkernel.consistency import vendor
from rlkernel.consistency.aten_call import Refused, Short, is_exact, module_of, need_floats, put, used
from rlkernel.runtime import invariance


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """[..., M, K] with [..., K, N] of one dtype: rounded once, with ``bias`` [N] before."""
    if dtype is None or dtype is torch.float32:
        found = plain(a, b, bias, dtype is not None)
        if found is not None:
            return found
    need_floats(a, b)
    used.backend, module = _backend(a.dtype, a.device)
    if a.dim() == 3:
        return module.forward(MatmulCall(a, b, bias, dtype or a.dtype)).out
    if bias is None and dtype in (None, a.dtype) and invariance.takes_vendors():
        found = vendor.product(a, b, lambda x, y: _one(module, x, y))
        if found is not None:
            used.backend = "torch, compared"
            return found
    return _one(module, a, b, bias, dtype)


def _one(
    module: ModuleType, a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    call = MatmulCall(a.unsqueeze(0), b.unsqueeze(0), bias, dtype or a.dtype)
    found: Tensor = module.forward(call).out.squeeze(0)
    return found


def plain(
    a: Tensor, b: Tensor, bias: Tensor | None = None, wide: bool = False, rank: int = 0
) -> Tensor | None:
    """The product of plain tensors of a CPU, in fp32 where it is ``wide``; None of others.

    Python's part of a call takes as long as a small product.
    """
    short = _short()
    found: Tensor | None = None if short is None else short((a, b, bias, wide, rank), {})
    if found is not None:
        used.backend = "native"
    return found


@functools.cache
def _short() -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    return dispatch.direct("product")


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


def _need_operands(
    original: Callable[..., Tensor],
    rank: int,
    operands: tuple[Tensor, ...],
    factors: dict[str, Any],
    base: Tensor | None = None,
) -> None:
    """What torch does not take raises torch's own error."""
    a, b = operands
    fits = a.dim() == b.dim() == rank and a.dtype == b.dtype
    fits = fits and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]
    if fits and base is not None:
        shape = (*a.shape[:-1], b.shape[-1])
        fits = base.dtype == a.dtype and base.dim() <= rank
        fits = fits and all(n in (1, m) for n, m in zip(base.shape[::-1], shape[::-1], strict=False))
    out = factors.get("out")
    if not fits or (out is not None and out.dtype != a.dtype):
        original(*(() if base is None else (base,)), a, b, **factors)
        raise Refused("its operands must have one dtype and shapes that fit")


def mm(original: Callable[..., Tensor], a: Tensor, b: Tensor, *, rank: int = 2, **out: Any) -> Tensor:
    if not out and (made := plain(a, b, rank=rank)) is not None:
        return made
    if is_exact(a):
        return original(a, b, **out)
    _need_operands(original, rank, (a, b), out)
    found = product(a, b)
    return put(out["out"], found) if out else found


def addmm(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, b: Tensor, *, rank: int = 2, **factors: Any
) -> Tensor:
    if is_exact(a):
        return original(base, a, b, **factors)
    _need_operands(original, rank, (a, b), factors, base)
    out = factors.pop("out", None)
    found = added(base, a, b, **factors)
    return found if out is None else put(out, found)


def addmm_in_place(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, b: Tensor, *, rank: int = 2, **factors: Any
) -> Tensor:
    if is_exact(a):
        return original(base, a, b, **factors)
    _need_operands(original, rank, (a, b), factors, base)
    if base.shape != (*a.shape[:-1], b.shape[-1]):
        return original(base, a, b, **factors)  # an error
    return base.copy_(added(base, a, b, **factors))


def _need_vector(original: Callable[..., Tensor], base: Tensor, a: Tensor, x: Tensor, factors: Any) -> None:
    fits = a.dim() == 2 and x.dim() == 1 and a.shape[1] == x.shape[0]
    fits = fits and base.shape in ((), (1,), a.shape[:1]) and a.dtype == x.dtype == base.dtype
    out = factors.get("out")
    if not fits or (out is not None and out.dtype != a.dtype):
        original(base, a, x, **factors)
        raise Refused("its operands must have one dtype and shapes that fit")


def addmv(original: Callable[..., Tensor], base: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Tensor:
    if is_exact(a):
        return original(base, a, x, **factors)
    _need_vector(original, base, a, x, factors)
    out = factors.pop("out", None)
    found = added(base.unsqueeze(-1), a, x[:, None], **factors)[:, 0]
    return found if out is None else put(out, found)


def addmv_in_place(
    original: Callable[..., Tensor], base: Tensor, a: Tensor, x: Tensor, **factors: Any
) -> Tensor:
    if is_exact(a):
        return original(base, a, x, **factors)
    _need_vector(original, base, a, x, factors)
    return base.copy_(added(base.unsqueeze(-1), a, x[:, None], **factors)[:, 0])


def dot(original: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    if is_exact(x) or x.dim() != 1 or x.shape != y.shape or x.dtype != y.dtype:  # exact, or an error
        return original(x, y)
    return product(x[None], y[:, None])[0, 0]


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
        out = a.new_empty(len(groups), a.shape[0], b.shape[1], dtype=dtype)
        for g, (first, end) in enumerate(groups):
            _product_into(out[g], a[:, first:end], b[first:end])
        return out
    out = a.new_zeros(a.shape[-2], b.shape[-1], dtype=dtype)
    for g, (first, end) in enumerate(groups):
        if a.dim() == 2:
            _product_into(out[first:end], a[first:end], b[g])
        else:
            _product_into(out[:, first:end], a[g], b[:, first:end])
    return out


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Where it lies dense and is a's dtype, without a copy."""
    if (short := _short()) is None or short((a, b, None, False, 2, out), {}) is None:
        out.copy_(product(a, b, dtype=out.dtype))
    else:
        used.backend = "native"


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
    "mm": Short("mm", mm),
    "mm.out": mm,
    "bmm": Short("bmm", functools.partial(mm, rank=3)),
    "bmm.out": functools.partial(mm, rank=3),
    "addmm": Short("addmm", addmm),
    "addmm.out": addmm,
    "addmm_": addmm_in_place,
    "baddbmm": functools.partial(addmm, rank=3),
    "baddbmm.out": functools.partial(addmm, rank=3),
    "baddbmm_": functools.partial(addmm_in_place, rank=3),
    "addmv": addmv,
    "addmv.out": addmv,
    "addmv_": addmv_in_place,
    "dot": dot,
    "vdot": dot,
}
