"""Root-mean-square normalisation of rows, with the residual sum in front of it."""

from types import ModuleType
from typing import overload

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.rms_norm import ROUNDINGS, RmsNormCall, RmsNormGrads, RmsNormOutput, RmsNormResults
from rlkernel.opaque import Grads, Op
from rlkernel.ops import _norm, _validate
from rlkernel.ops._direct import direct
from rlkernel.ops._typed import typed
from rlkernel.types import NormRounding


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: None = None,
    weight_offset: float = 0.0,
    rounding: NormRounding = "before_weight",
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor,
    weight_offset: float = 0.0,
    rounding: NormRounding = "before_weight",
) -> RmsNormOutput: ...


@direct
@typed
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: NormRounding = "before_weight",
) -> Tensor | RmsNormOutput:
    """Divide each row by its root mean square and scale it, after adding a residual where one is given.

    Equal to, in fp32 and with ``h = x``, or ``h = x + residual`` rounded to their dtype,

        normed = h / sqrt(mean(h**2) + eps)                     rounded to x's dtype here, "before_weight",
        normed * (weight + weight_offset)                       or here alone, "after_weight"

    without the second line where there is no weight.  Differentiable in ``x``, ``residual`` and ``weight``.

    A row's bits, and those of its gradient, depend on that row alone: not on the other rows, their number,
    the memory layout or the number of threads (batch-invariant).  The weight's gradient is a sum over all
    rows in an order that their number decides (run-to-run).

    Args:
        x: [..., H] fp16, bf16, fp32 or fp64, any strides on the leading dimensions: of queries and keys per
            head, a slice of ``[..., heads, head_dim]`` is not copied.
        weight: [H] floats of any width; None: 1 each.
        eps: >= 0, added to the mean of squares.
        residual: as ``x``, of its dtype; the sum is the second output.
        weight_offset: added to the weight, in fp32: 1 for Gemma.
        rounding: where a narrow dtype is rounded to: ``"before_weight"`` as Llama's and Qwen's norms in
            transformers and vLLM's ``RMSNorm``, the normalised row and then the product; or
            ``"after_weight"``, the product alone, as Gemma's and ``torch.nn.functional.rms_norm``.

    Returns:
        A tensor of ``x``'s shape and dtype; with ``residual`` an ``RmsNormOutput`` (normed, summed).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows ``LlamaRMSNorm`` and ``GemmaRMSNorm`` of transformers; with a residual, a decoder layer's sum and
    the norm behind it.

    Examples:
        >>> rlkernel.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    _norm.check_rows(x)
    if residual is not None:
        _validate.is_tensor("residual", residual)
        _validate.like("residual", residual, "x", x)
        _validate.same_dtype("residual", residual, "x", x)
    weight = _norm.parameter("weight", weight, x)
    eps = _norm.epsilon(eps)
    if type(weight_offset) is not float or not -2 < weight_offset < 2:
        weight_offset = _validate.number("weight_offset", weight_offset)
    _validate.choice("rounding", rounding, ROUNDINGS)
    x = _validate.rows(x, x.dtype)
    statistics = _norm.differentiated(x, residual, weight)
    if residual is not None:
        residual = _validate.rows(residual, x.dtype)
    call = RmsNormCall(x, residual, weight, eps, weight_offset, rounding, statistics)
    return op(call)[0] if residual is None else RmsNormOutput(*op_of_sum(call))


def _like(call: RmsNormCall) -> RmsNormResults:
    x = call.x
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if call.residual is None else torch.empty_like(normed)
    return RmsNormResults(normed, summed, _norm.like_statistics(x) if call.statistics else None)


def _backward(impl: ModuleType, call: RmsNormCall, results: RmsNormResults, grads: Grads) -> Grads:
    normed, summed = grads
    if normed is not None:
        grad_x, grad_weight = impl.backward(call, results, RmsNormGrads(normed, summed))
    else:  # only the sum is used
        grad_x, grad_weight = summed, None if call.weight is None else torch.zeros_like(call.weight)
    return grad_x, grad_x if call.needs[1] else None, grad_weight if call.needs[2] else None


def _op(name: str, *read: str) -> Op:
    """``read``: what backward reads. Of a sum it is the sum, and x is not kept."""
    return Op(
        name,
        RmsNormCall,
        RmsNormResults,
        outputs=2,
        pick=lambda call: dispatch.pick("rms_norm", call.x),
        backward=_backward,
        like=_like,
        gradients=("x", "residual", "weight"),
        differentiable=("normed", "summed"),
        saves=(*read, "weight", "rstd"),
    )


op = _op("rms_norm", "x")
op_of_sum = _op("rms_norm_of_sum", "summed")
