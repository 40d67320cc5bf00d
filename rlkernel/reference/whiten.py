"""What ``whiten`` means, in plain PyTorch."""

import math

import torch
from torch import Tensor

from rlkernel.calls.whiten import WhitenCall, WhitenResults
from rlkernel.reference import unsupported as unsupported


def forward(call: WhitenCall) -> WhitenResults:
    x, mask, weights, _, unbiased, *_ = call
    # fp64 sums: a mean that is off by one fp32 ulp of 1000 is off by 1e-4 of the spread of 1000.0 to 1000.3
    wide = x.double()
    share = torch.ones_like(wide) if weights is None else weights.double()
    if mask is not None:
        share = torch.where(mask, share, 0)
    counts = share != 0
    count = share.sum()
    first = _first(wide, counts)
    above = torch.where(counts, share * (wide - first), 0).sum()
    mean = first + above / count.clamp(min=torch.finfo(torch.float64).tiny)
    squares = torch.where(counts, share * (wide - mean).square(), 0).sum()
    return WhitenResults(_scaled(call, mean, _variance(count, squares, unbiased)))


def _first(x: Tensor, counts: Tensor) -> Tensor:
    """The first that counts, or 0: of what is equal the differences to it, and their mean, are exactly 0."""
    if not x.numel():
        return x.new_zeros(())
    at = counts.flatten().int().argmax()
    return torch.where(counts.any(), x.flatten().gather(0, at[None])[0], 0)


def _variance(count: Tensor, squares: Tensor, unbiased: bool) -> Tensor:
    # not less than one element: a single one has variance 0, not 0 / 0
    return squares / (count - int(unbiased)).clamp(min=torch.finfo(torch.float32).eps)


def _scaled(call: WhitenCall, mean: Tensor, variance: Tensor, clip: float = math.inf) -> Tensor:
    x, mask, _, shift_mean, _, eps, eps_in = call
    centred = x.double() - mean
    scale = (variance + eps).sqrt() if eps_in == "variance" else variance.sqrt() + eps
    result = torch.where(centred == 0, 0, centred / scale)
    if not shift_mean:
        result = result + mean
    result = result.clamp(-clip, clip)
    return (result if mask is None else torch.where(mask, result, 0)).to(x.dtype)


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    masked: float = 0.2,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.whiten`` for ``x`` of ``shape``."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float32, device=device) * 3 + 5
    return {
        "x": x.to(dtype),
        "mask": torch.rand(shape, generator=g, dtype=torch.float32, device=device) >= masked,
    }
