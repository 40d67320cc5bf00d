"""Rotary position embedding: pairs of a head's elements are turned by the angle of their token."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.rotary import ROUNDINGS, RotaryCall, RotaryGrads, RotaryOutput, RotaryResults
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._typed import typed
from rlkernel.runtime import tracing
from rlkernel.runtime.modes import without_autocast
from rlkernel.types import RotaryRounding


@typed
def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    rounding: RotaryRounding = "before_sum",
    inplace: bool = False,
) -> RotaryOutput:
    """Turn pairs of elements of every head of the queries and keys by the angles of their token.

    Equal to, for a pair ``x1, x2`` of a head, ``R / 2`` apart or side by side, and for ``R = rotary_dim``,

        y1 = x1 * cos - x2 * sin                each product rounded to q's dtype, "before_sum", and the sum;
        y2 = x2 * cos + x1 * sin                or the sum alone, "after_sum", of products in fp32

    What stands behind the first ``R`` elements of a head stays.  Differentiable in ``q`` and ``k``: the
    gradient is turned back, and rounded where autograd rounds that of the composition.

    An element's bits depend on its pair and its angle alone (batch-invariant).

    Args:
        q: [T, H, D] or [B, H, T, D] fp16, bf16, fp32 or fp64, or with the heads at another dimension; any
            strides: a transposed view or a slice of a wider tensor is not copied.
        k: as ``q``, of as many heads as it likes; None: there is none.
        cos: [T, W] or [B, T, W] floats, of which any but W may be 1; with ``positions`` a table [P, W].  W is
            ``rotary_dim``, each angle twice as transformers has it, or half of that.
        sin: as ``cos``.
        positions: [T] or [B, T] integers: the rows of ``cos`` and ``sin``.
        unsqueeze_dim: the dimension of the heads in ``q``: 1, or 2 for [B, T, H, D].
        rotary_dim: how many elements of a head turn, even; None: as many as ``cos`` has.
        interleaved: whether neighbours are pairs, as in GPT-J; else the two halves are, as in GPT-NeoX and
            Llama.
        rounding: where a narrow dtype is rounded to: ``"before_sum"`` as transformers and vLLM, after
            rounding ``cos`` and ``sin`` to it; or ``"after_sum"``, once.
        inplace: write over ``q`` and ``k``, which must not require a gradient, nor share memory.

    Returns:
        ``RotaryOutput`` (q, k).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows ``apply_rotary_pos_emb`` of transformers and ``RotaryEmbedding`` of vLLM.

    Examples:
        >>> angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1])).repeat(1, 2)[None]
        >>> q, k = torch.randn(1, 4, 5, 4), torch.randn(1, 2, 5, 4)
        >>> rotated = rlkernel.rotary(q, k, angles.cos(), angles.sin())
        >>> torch.equal(rotated.q[:, :, 0], q[:, :, 0]), rotated.k.shape
        (True, torch.Size([1, 2, 5, 4]))
    """
    _validate.floating("q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"q must be [T, H, D] or [B, H, T, D], got {tuple(q.shape)}")
    heads = unsqueeze_dim + q.dim() if unsqueeze_dim < 0 else unsqueeze_dim
    if not 0 <= heads <= q.dim() - 2:
        raise ValueError(
            f"unsqueeze_dim must be in [0, {q.dim() - 2}] for q of {q.dim()}, got {unsqueeze_dim}"
        )
    tokens = q.shape[:heads] + q.shape[heads + 1 : -1]
    if k is not None:
        _check_keys(k, q, heads)
    cos, sin = _tables(q, cos, sin)
    width = cos.shape[-1]
    rotary_dim = width if rotary_dim is None else rotary_dim
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > q.shape[-1]:
        want = f"even, from 2 to the {q.shape[-1]} elements of a head"
        raise ValueError(f"rotary_dim must be {want}, got {rotary_dim}")
    if not _validate.among(width, rotary_dim, rotary_dim // 2):
        raise ValueError(f"cos must have {rotary_dim} or {rotary_dim // 2} columns, got {width}")
    if positions is None:
        cos, sin = (_spread(name, x, tokens) for name, x in (("cos", cos), ("sin", sin)))
    else:
        positions = _places(positions, tokens, cos)
    _validate.choice("rounding", rounding, ROUNDINGS)
    wanted = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    if inplace and wanted:
        raise ValueError("inplace must be False where q or k requires a gradient, got True")
    if inplace and not tracing.is_on():  # a compiled graph turns a copy, and writes that
        _check_written(q, k)
    given = q, k
    q = _validate.rows(q, q.dtype)
    k = k if k is None else _validate.rows(k, k.dtype)
    call = RotaryCall(q, k, cos, sin, positions, heads, rotary_dim, interleaved, rounding, inplace)
    found = RotaryOutput(*op(call))
    return _written(given, found) if inplace else found


def _check_keys(k: Tensor, q: Tensor, heads: int) -> None:
    _validate.is_tensor("k", k)
    want = tuple(q.shape[:heads]), tuple(q.shape[heads + 1 :])
    if k.dim() != q.dim() or (tuple(k.shape[:heads]), tuple(k.shape[heads + 1 :])) != want:
        shape = ", ".join(map(str, (*want[0], "any", *want[1])))
        raise ValueError(f"k must have q's shape ({shape}), got {tuple(k.shape)}")
    _validate.same_dtype("k", k, "q", q)
    _validate.same_device("k", k, "q", q.device)


def _check_written(q: Tensor, k: Tensor | None) -> None:
    """Of memory that is written twice the second turn would begin with what the first has written."""
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            _validate.apart(name, x, "inplace=True")
    if k is not None and _meet(q, k):
        raise ValueError("k must share no memory with q where inplace is True, got two views of one")


def _meet(q: Tensor, k: Tensor) -> bool:
    """Whether some element of both is one; those of a fused projection lie between each other."""
    same = q.numel() and k.numel() and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    if not same:
        return False
    steps: dict[int, list[int]] = {}  # of each stride, how far it may lead back and forth
    for x, way in ((q, 1), (k, 0)):
        for stride, n in zip(x.stride(), x.shape, strict=True):
            if n > 1:
                steps.setdefault(stride, [0, 0])[way] += n - 1
    distance = int(k.storage_offset()) - int(q.storage_offset())
    return _leads(distance, sorted(steps.items(), reverse=True))


def _leads(distance: int, steps: list[tuple[int, list[int]]]) -> bool:
    """Whether ``distance`` is a sum of strides, each taken at most so many times back and forth."""
    if not steps:
        return distance == 0
    (stride, (back, forth)), rest = steps[0], steps[1:]
    least = distance - sum(s * f for s, (_, f) in rest)
    most = distance + sum(s * b for s, (b, _) in rest)
    times = range(max(-back, -(-least // stride)), min(forth, most // stride) + 1)
    return any(_leads(distance - n * stride, rest) for n in times)


def _tables(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _validate.constant("cos", cos)
    _validate.constant("sin", sin)
    if cos.dim() == 0:
        raise ValueError("cos must be [..., W], got ()")
    _validate.same_device("cos", cos, "q", q.device)
    _validate.like("sin", sin, "cos", cos)
    _validate.same_dtype("sin", sin, "cos", cos)
    wide = torch.float32 if cos.dtype == torch.float64 != q.dtype else cos.dtype
    return _validate.rows(cos, wide), _validate.rows(sin, wide)


def _spreads(shape: Sequence[int], tokens: Sequence[int]) -> bool:
    return len(shape) == len(tokens) and all(
        _validate.among(a, 1, b) for a, b in zip(shape, tokens, strict=True)
    )


def _spread(name: str, table: Tensor, tokens: torch.Size) -> Tensor:
    """A row for each token, though there may be fewer in memory."""
    shape = table.shape[:-1]
    if shape == tokens:
        return table
    if not _spreads(shape, tokens):
        want = f"{(*tokens, 'W')}".replace("'", "")
        raise ValueError(f"{name} must have the shape {want} of q's tokens, got {tuple(table.shape)}")
    return table.expand(*tokens, table.shape[-1])


def _places(positions: Tensor, tokens: torch.Size, table: Tensor) -> Tensor:
    if table.dim() != 2:
        raise ValueError(f"cos must be [P, W] with positions, got {tuple(table.shape)}")
    shape = positions.shape
    if not _spreads(shape, tokens):
        raise ValueError(f"positions must have the shape {tuple(tokens)} of q's tokens, got {tuple(shape)}")
    if shape != tokens:
        positions = positions.expand(tokens)
    found = _validate.target_ids(positions, tokens, "q", table.device, "positions")
    last = table.shape[0] - 1
    _validate.look("positions", found.flatten(), lambda x: 0 <= x <= last, f"in [0, {last}]")
    return found.contiguous()


def _written(given: tuple[Tensor, Tensor | None], found: RotaryOutput) -> RotaryOutput:
    """The tensors that were given, which hold what was found."""
    for x, y in zip(given, found, strict=True):
        if x is None or y is None:
            continue
        if x is not y:
            x.copy_(y)
        elif not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return RotaryOutput(*given)


def _forward(impl: ModuleType, call: RotaryCall) -> RotaryResults:
    with without_autocast(call.q.device):  # the dtype is that of the tensors
        results: RotaryResults = impl.forward(call)
    return results


def _backward(
    impl: ModuleType, call: RotaryCall, results: RotaryResults, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    with without_autocast(call.cos.device):
        found: tuple[Tensor | None, ...] = impl.backward(call, RotaryGrads(*grads))
    return found


def _like(call: RotaryCall) -> RotaryResults:
    return RotaryResults(torch.empty_like(call.q), None if call.k is None else torch.empty_like(call.k))


op = Op(
    "rotary",
    RotaryCall,
    RotaryResults,
    pick=("q",),
    forward=_forward,
    backward=_backward,
    like=_like,
    gradients=("q", "k"),
    differentiable=("q", "k"),
    saves=("cos", "sin", "positions"),
    in_node={"inplace": False},
)
