"""Linear layers and an embedding of which a rank holds a part, forward and backward.

A sum that the ranks share out, over the inputs of a row-parallel layer and over the outputs of a
column-parallel one in its backward pass, is one tree over eight segments: each rank adds up its own segments
in fp32, and the ranks' nodes are added in the order of the tree.  Sums that no rank shares with another are
those of the whole layer.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.matmul import MatmulCall
from rlkernel.drivers import rank_tree
from rlkernel.drivers.rank_tree import SEGMENTS, gathered, segments_of
from rlkernel.ops import _validate
from rlkernel.runtime import debug, ranges
from rlkernel.runtime.modes import autocasts, once_differentiable, without_autocast
from rlkernel.runtime.schema import resolved

Group = dist.ProcessGroup | None
Saved = tuple[Any, ...]


def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Group = None) -> Tensor:
    """A linear layer whose inputs the ranks of ``group`` share out; every rank gets all of its outputs.

    Equal to ``F.linear(cat(x of all ranks), cat(weight of all ranks, 1), bias)``, with the bits that this has
    under ``rlkernel.batch_invariant(level="tensor_parallel")``: 1, 2, 4 and 8 ranks give the same.

    Args:
        x: [..., K / R] fp16, bf16 or fp32, the rank's part of the inputs, in the order of the ranks.
        weight: [N, K / R] of the same dtype.
        bias: [N] or None, the same on every rank.
        group: of 1, 2, 4 or 8 ranks; None is one rank alone.

    Returns:
        [..., N], the same on every rank.

    Raises:
        ValueError: an argument is off; 8 does not divide K.
    """
    ranks = _checked(x, weight, bias, group)
    _divisible("weight", "K", weight.shape[1] * ranks)
    x, weight, bias = _cast(x, weight, bias)
    return _Row.apply(x, weight, bias, group, SEGMENTS // ranks)


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    gather_output: bool = False,
) -> Tensor:
    """A linear layer whose outputs the ranks of ``group`` share out; its inputs are the same on every rank.

    Equal to a part of ``F.linear(x, cat(weight of all ranks), cat(bias of all ranks))``, and so are the
    gradients, with the bits that they have under ``rlkernel.batch_invariant(level="tensor_parallel")``.

    Args:
        x: [..., K] fp16, bf16 or fp32, the same on every rank.
        weight: [N / R, K] of the same dtype: the rank's part, in the order of the ranks.
        bias: [N / R] or None.
        group: of 1, 2, 4 or 8 ranks; None is one rank alone.
        gather_output: give every rank all outputs; the gradient must then be the same on every rank.

    Returns:
        [..., N / R], or [..., N].

    Raises:
        ValueError: an argument is off; 8 does not divide N.
    """
    ranks = _checked(x, weight, bias, group)
    _divisible("weight", "N", weight.shape[0] * ranks)
    x, weight, bias = _cast(x, weight, bias)
    out = _Column.apply(x, weight, bias, group, SEGMENTS // ranks)
    return _GatherColumns.apply(out, group) if gather_output and ranks > 1 else out


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, group: Group = None, *, padding_idx: int | None = None
) -> Tensor:
    """The rows of a table that the ranks of ``group`` share out, in equal parts and in their order.

    Equal to ``F.embedding(ids, cat(weight of all ranks))``, to the bit: of the ranks' terms all but one are
    -0.0, which changes no other number, so that no order of the sum shows.

    Args:
        ids: [...] of any integer type, the same on every rank.
        weight: [V / R, H] of any floating dtype.
        group: None is one rank alone.
        padding_idx: the id whose row gets no gradient, or None.

    Returns:
        [..., H], the same on every rank.

    Raises:
        ValueError: an id lies outside the table, where looking costs nothing: on a CPU, and on a GPU in debug
            mode; weight is no table.
    """
    _validate.floating("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V / ranks, H], got {tuple(weight.shape)}")
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    vocab = len(weight)
    if ids.numel() and debug.may_read(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab * ranks:
        got = f"{int(ids.min())} ... {int(ids.max())}"
        raise ValueError(f"ids must be in [0, {vocab * ranks}), got {got}")
    if ranks == 1:
        return F.embedding(ids, weight, padding_idx)
    here = ids - rank * vocab
    mine = (here >= 0) & (here < vocab)
    padding = None if padding_idx is None else padding_idx - rank * vocab
    if padding is not None and not 0 <= padding < vocab:
        padding = None
    rows = F.embedding(torch.where(mine, here, 0), weight, padding)
    return _OneOfRanks.apply(torch.where(mine[..., None], rows, -0.0), group)


def shared_weight(weight: Tensor, heads: int, group: Group = None) -> Tensor:
    """[heads, D] of a weight [D] that every head of every rank uses: its gradient is a sum over all heads.

    That sum is taken in the order of the heads, of which each rank holds ``heads``, in fp32 and on every
    rank: 1, 2, 4 and 8 ranks give the same bits.
    """
    return _Shared.apply(weight, heads, group)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, segments: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        node = _forward(x, weight.mT, None, wide, segments)
        if bias is None:
            return rank_tree.summed(node, x.dtype, group)
        return rank_tree.summed(node, wide, group).add_(bias.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable("row_parallel_linear")
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = saved
        # the outputs are on every rank, and so is the sum over them
        return (
            *_gradients(grad, x, weight, bias, ctx.needs_input_grad, segments_of(len(weight))),
            None,
            None,
        )


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, segments: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.group, ctx.segments = group, segments
        return _forward(x, weight.mT, bias, x.dtype, segments_of(x.shape[-1]))

    @staticmethod
    @once_differentiable("column_parallel_linear")
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = saved
        needs = ctx.needs_input_grad
        grad_x = None
        if needs[0]:
            wide = torch.promote_types(x.dtype, torch.float32)
            grad_x = rank_tree.summed(_forward(grad, weight, None, wide, ctx.segments), x.dtype, ctx.group)
        _, grad_weight, grad_bias = _gradients(grad, x, weight, bias, (False, *needs[1:]), 1)
        return grad_x, grad_weight, grad_bias, None, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.here = slice(group.rank() * out.shape[-1], (group.rank() + 1) * out.shape[-1])
        return gathered(out, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.here], None


class _OneOfRanks(torch.autograd.Function):
    """The sum over the ranks of terms of which all but one are -0.0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        return rank_tree.summed(rows, rows.dtype, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, heads: int, group: Group) -> Tensor:
        ctx.save_for_backward(weight)  # which leads a second derivative here, to be refused
        ctx.group = group
        return weight.expand(heads, -1).clone()

    @staticmethod
    @once_differentiable("shared_weight")
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> tuple[Tensor, None, None]:
        every = grad if ctx.group is None else gathered(grad.contiguous(), ctx.group).flatten(0, 1)
        total, *others = every.to(torch.promote_types(grad.dtype, torch.float32))
        for other in others:
            total = total + other
        return total.to(grad.dtype), None, None


def _forward(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, segments: int) -> Tensor:
    """[..., K] with [K, N]."""
    call = resolved(MatmulCall(_rows(a), b[None], bias, dtype, segments))
    impl = dispatch.pick("matmul", call.a, call.b)
    with without_autocast(a.device), ranges.of("matmul", impl):
        out = impl.forward(call).out
    return out.view(*a.shape[:-1], b.shape[1])


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...], segments: int
) -> tuple[Tensor | None, ...]:
    """Of x, weight and bias, of sums that this rank has whole."""
    wanted = (needs[0], needs[1], needs[2] and bias is not None)
    call = MatmulCall(_rows(x), weight.mT[None], bias, x.dtype, grad_segments=segments, needs=wanted)
    call, grad = resolved(call), resolved(grad)
    impl = dispatch.pick("matmul", call.a, call.b)
    with without_autocast(x.device), ranges.of("matmul", impl, backward=True):
        found = impl.backward(call, None, _rows(grad))
    return (
        None if found.a is None else found.a.view(x.shape),
        None if found.b is None else found.b[0].mT,
        found.bias,
    )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1, x.numel() // max(x.shape[-1], 1), x.shape[-1])


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast has the operands of a linear layer."""
    if not autocasts(x.device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> int:
    """The number of ranks."""
    _validate.floating("x", x)
    _validate.floating("weight", weight)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        want = f"[N, {x.shape[-1] if x.dim() else 'K'}] as x is [..., K]"
        raise ValueError(f"weight must be {want}, got {tuple(weight.shape)}")
    if x.dtype != weight.dtype and not autocasts(x.device):
        raise ValueError(
            f"weight must be {_validate.name(x.dtype)} as x is, got {_validate.name(weight.dtype)}"
        )
    _validate.same_device("weight", weight, "x", x.device)
    if bias is not None:
        _validate.floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be [{len(weight)}], got {tuple(bias.shape)}")
        _validate.same_device("bias", bias, "x", x.device)
    if group is None:
        return 1
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a torch.distributed process group, got {type(group).__name__}")
    if group.size() not in (1, 2, 4, 8):
        raise ValueError(f"group must have 1, 2, 4 or 8 ranks, got {group.size()}")
    return group.size()


def _divisible(name: str, what: str, size: int) -> None:
    if size % SEGMENTS:
        raise ValueError(f"{name} must have a {what} of all ranks that {SEGMENTS} divides, got {size}")
