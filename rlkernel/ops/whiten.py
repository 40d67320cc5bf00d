"""Masked whitening: zero mean and unit variance over what counts."""

import torch
from torch import Tensor

from rlkernel.calls.whiten import EPS_PLACES, WhitenCall, WhitenResults
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._typed import typed
from rlkernel.types import EpsIn


@typed
def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    eps_in: EpsIn = "variance",
) -> Tensor:
    """Shift and scale ``x`` to mean 0 and variance 1 over the elements that count.

    Equal to, over the elements whose mask is set, with weights 1 unless given and ``n = sum(weights)``,

        mean = sum(weights * x) / n
        var = sum(weights * (x - mean)**2) / (n - 1)              n instead of n - 1 with unbiased=False
        (x - mean) / sqrt(var + eps)                              / (sqrt(var) + eps) with eps_in="std"

    Two passes in fp64: values that share a large offset keep their digits.  The result is 0 where the mask
    is not set, whatever stands there, and where all that counts is one element or none.  The same call gives
    the same bits (run-to-run), whatever the number of threads or the size of the launch.

    Args:
        x: [...] floats.
        mask: [...], nonzero where an element counts; None means everywhere.
        weights: [...] >= 0: how many elements each stands for, such as a sequence's tokens; what an element
            of weight 0 holds is part of no statistic.
        shift_mean: False adds the mean back after scaling.
        unbiased: divide by n - 1.
        eps: >= 0.
        eps_in: "variance" as verl (``rsqrt(var + 1e-8)``), or "std" as TRL (``std + 1e-4``).

    Returns:
        A tensor of ``x``'s shape in fp32 (fp64 for fp64), without a gradient.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  In debug mode also where
            an element that counts is not finite; otherwise all results are NaN then.

    Follows verl's ``masked_whiten``, which raises where less than two elements count.

    Examples:
        >>> rlkernel.whiten(torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1, 1, 1, 0]))
        tensor([-1.,  0.,  1.,  0.])
    """
    _validate.constant("x", x)
    mask = _validate.mask(mask, "x", x)
    if weights is not None:
        _validate.constant("weights", weights)
        _validate.like("weights", weights, "x", x)
    eps = _validate.number("eps", eps, 0.0)
    _validate.choice("eps_in", eps_in, EPS_PLACES)
    x = _validate.dense(x, torch.promote_types(x.dtype, torch.float32))
    mask, weights = (None if t is None else t.contiguous() for t in (mask, weights))
    return op(WhitenCall(x, mask, weights, shift_mean, unbiased, eps, eps_in))[0]


def _like(call: WhitenCall) -> WhitenResults:
    return WhitenResults(torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device))


op = Op("whiten", WhitenCall, WhitenResults, pick=("x",), forward=_validate.finite_in_debug("x"), like=_like)
