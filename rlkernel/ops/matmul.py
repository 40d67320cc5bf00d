"""A matrix product whose rows have the same bits in any batch."""

import math
from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads, MatmulResults
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._typed import typed
from rlkernel.runtime.modes import autocasts, without_autocast

SEGMENTS = (1, 2, 4, 8)


@typed
def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    segments: int = 1,
    grad_segments: int | None = None,
) -> Tensor:
    """The product of matrices, of which every element has bits that the reduced dimension alone decides.

    Equal to ``torch.matmul(a, b) + bias`` in fp32 (fp64 for fp64), rounded once to ``out_dtype``.

    A row of the product has the same bits alone and in any batch, at any place in it, beside any other rows
    (batch-invariant); so has every gradient of ``a``.  The gradients of ``b`` and ``bias`` are sums over the
    rows, in a fixed order: the same rows give the same bits.  That holds on every backend but the reference,
    and backends differ: on a CPU the order of the sum is declared, the same on every processor.

    With ``segments`` a sum is a balanced tree: K is cut into so many equal parts, each summed as K is else,
    and neighbours are added in fp32, pair by pair, before the rounding.  The product of one half of K with
    half of the segments is then a node of it: ranks that share K out get the bits of one that has it whole.

    Args:
        a: [..., M, K] fp16, bf16, fp32 or fp64.
        b: [K, N] or [..., K, N] of the same dtype, read where it is: for a linear layer ``weight.t()``, a
            view.  Batch dimensions are broadcast as torch.matmul does it.  Under autocast both are used in
            autocast's dtype.
        bias: [N] or None; added before the rounding.
        out_dtype: the dtype of ``a``, which None stands for, or torch.float32.
        segments: 1, 2, 4 or 8, which divides K.
        grad_segments: the same of N, whose sum the gradient of ``a`` is; None stands for
            ``segments`` where they divide N, and for 1 elsewhere.

    Returns:
        [..., M, N]; an empty sum (K = 0) is 0.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows thinking-machines' ``batch_invariant_ops``, whose product has no gradient, and the tree of TBIK
    (arXiv 2511.17826), whose nodes are in 16 bits.

    Examples:
        >>> a, b = torch.randn(64, 32), torch.randn(32, 8)
        >>> torch.equal(rlkernel.matmul(a, b)[:1], rlkernel.matmul(a[:1], b))
        True
    """
    _validate.floating("a", a)
    _validate.floating("b", b)
    for name, x in (("a", a), ("b", b)):
        if x.dim() < 2:
            raise ValueError(f"{name} must have two dimensions or more, got {tuple(x.shape)}")
    _validate.same_device("b", b, "a", a.device)
    if autocasts(a.device) and torch.float64 not in (a.dtype, b.dtype):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = a.to(dtype), b.to(dtype)
    if a.dtype != b.dtype:
        raise ValueError(f"b must be {_validate.name(a.dtype)} as a is, got {_validate.name(b.dtype)}")
    inner, columns = b.shape[-2:]
    if a.shape[-1] != inner:
        raise ValueError(f"b must be [..., {a.shape[-1]}, N] as a is [..., M, K], got {tuple(b.shape)}")
    if bias is not None:
        _validate.floating("bias", bias)
        if bias.shape != (columns,):
            raise ValueError(f"bias must be [{columns}], got {tuple(bias.shape)}")
        _validate.same_device("bias", bias, "a", a.device)
    out_dtype = _out_dtype(out_dtype, a.dtype)
    _check_segments("segments", "K", inner, segments)
    if grad_segments is None:
        grad_segments = segments if columns % segments == 0 else 1
    _check_segments("grad_segments", "N", columns, grad_segments)
    if math.prod(b.shape[:-2]) == 1 and b.dim() <= a.dim():  # one matrix for all rows
        shape: tuple[int, ...] = a.shape[:-1]
        a, b = a.reshape(1, math.prod(shape), inner), b.reshape(1, inner, columns)
    else:
        a, b, shape = _batched(a, b)
    return op(MatmulCall(a, b, bias, out_dtype, segments, grad_segments))[0].view(*shape, columns)


def _out_dtype(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    if wanted is None:
        return dtype
    allowed = [dtype] if dtype.itemsize >= 4 else [torch.float32, dtype]
    if not isinstance(wanted, torch.dtype) or wanted not in allowed:
        got = _validate.name(wanted) if isinstance(wanted, torch.dtype) else repr(wanted)
        raise ValueError(f"out_dtype must be {' or '.join(map(_validate.name, allowed))}, got {got}")
    return wanted


def _check_segments(name: str, what: str, size: int, count: int) -> None:
    if isinstance(count, bool) or count not in SEGMENTS:
        raise ValueError(f"{name} must be one of {', '.join(map(str, SEGMENTS))}, got {count!r}")
    if size % count:
        raise ValueError(f"{name} must divide {what} = {size}, got {count}")


def _batched(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Both with one batch dimension, and the shape of the product but for its columns."""
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        want = f"batch dimensions that go with a's {tuple(a.shape[:-2])}"
        raise ValueError(f"b must have {want}, got {tuple(b.shape[:-2])}") from None
    count = math.prod(batch)
    rows = a.shape[-2]
    a = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    return a, b, (*batch, rows)


def _forward(impl: ModuleType, call: MatmulCall) -> MatmulResults:
    with without_autocast(call.a.device):  # the dtype is that of the operands, and of their sums fp32
        results: MatmulResults = impl.forward(call)
    return results


def _backward(
    impl: ModuleType, call: MatmulCall, results: MatmulResults, grads: tuple[Tensor | None, ...]
) -> MatmulGrads:
    with without_autocast(call.a.device):
        found: MatmulGrads = impl.backward(call, results, grads[0])
    return found


def _like(call: MatmulCall) -> MatmulResults:
    a, b = call.a, call.b
    return MatmulResults(torch.empty(*a.shape[:2], b.shape[2], dtype=call.out_dtype, device=a.device))


op = Op(
    "matmul",
    MatmulCall,
    MatmulResults,
    pick=("a", "b"),
    like=_like,
    forward=_forward,
    backward=_backward,
    gradients=("a", "b", "bias"),
    differentiable=("out",),
    saves=("a", "b", "bias"),
)
