"""Layer normalisation of rows: mean 0 and variance 1, then scale and shift."""

import torch
from torch import Tensor

from rlkernel.calls.layer_norm import LayerNormCall, LayerNormResults
from rlkernel.opaque import Op
from rlkernel.ops import _norm, _validate
from rlkernel.ops._direct import direct
from rlkernel.ops._typed import typed


@direct
@typed
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Shift each row to mean 0, divide it by its standard deviation, scale and shift it.

    Equal to, in fp32 and rounded once,

        (x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias

    with weights 1 and biases 0 where they are not given.  The variance is taken of differences, and what
    rounding took from the mean is given back: rows with a large common offset keep their digits.
    Differentiable in ``x``, ``weight`` and ``bias``; backward reads the mean rounded, as torch's does, and is
    as exact as that.

    A row's bits, and those of its gradient, depend on that row alone: not on the other rows, their number,
    the memory layout or the number of threads (batch-invariant).  The gradients of weight and bias are sums
    over all rows in an order that their number decides (run-to-run).

    Args:
        x: [..., H] fp16, bf16, fp32 or fp64, any strides on the leading dimensions.
        weight: [H] floats of any width; None: 1 each.
        bias: [H], likewise; None: 0 each.
        eps: >= 0, added to the variance.

    Returns:
        A tensor of ``x``'s shape and dtype.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows ``torch.nn.functional.layer_norm`` over the last dimension.

    Examples:
        >>> rlkernel.layer_norm(torch.tensor([[1.0, 3.0], [5.0, 1.0]]), weight=torch.tensor([2.0, 1.0]))
        tensor([[-2.0000,  1.0000],
                [ 2.0000, -1.0000]])
    """
    _norm.check_rows(x)
    weight, bias = _norm.parameter("weight", weight, x), _norm.parameter("bias", bias, x)
    eps = _norm.epsilon(eps)
    statistics = _norm.differentiated(x, weight, bias)
    return op(LayerNormCall(_validate.rows(x, x.dtype), weight, bias, eps, statistics))[0]


def _like(call: LayerNormCall) -> LayerNormResults:
    x = call.x
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not call.statistics:
        return LayerNormResults(normed, None, None)
    return LayerNormResults(normed, _norm.like_statistics(x), _norm.like_statistics(x))


op = Op(
    "layer_norm",
    LayerNormCall,
    LayerNormResults,
    outputs=1,
    pick=("x",),
    backward=lambda impl, call, results, grads: impl.backward(call, results, grads[0]),
    like=_like,
    gradients=("x", "weight", "bias"),
    differentiable=("normed",),
    saves=("x", "weight", "bias", "mean", "rstd"),
)
