"""What ``whiten`` means, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.whiten import WhitenCall, WhitenResults


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return []


def forward(call: WhitenCall) -> WhitenResults:
    x, mask, weights, shift_mean, unbiased, eps, eps_in = call
    # fp64 sums: a mean that is off by one fp32 ulp of 1000 is off by 1e-4 of the spread of 1000.0 to 1000.3
    wide = x.double()
    share = torch.ones_like(wide) if weights is None else weights.double()
    if mask is not None:
        share = torch.where(mask, share, 0)
    counts = share != 0
    count = share.sum()
    mean = torch.where(counts, share * wide, 0).sum() / count.clamp(min=torch.finfo(torch.float64).tiny)
    centred = wide - mean
    squares = torch.where(counts, share * centred.square(), 0).sum()
    # not less than one element: a single one has variance 0, not 0 / 0
    variance = squares / (count - int(unbiased)).clamp(min=torch.finfo(torch.float32).eps)
    scale = (variance + eps).sqrt() if eps_in == "variance" else variance.sqrt() + eps
    result = torch.where(centred == 0, 0, centred / scale)
    if not shift_mean:
        result = result + mean
    return WhitenResults((result if mask is None else torch.where(mask, result, 0)).to(x.dtype))


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    masked: float = 0.2,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.whiten`` for ``x`` of ``shape``."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=g, device=device) * 3 + 5
    return {"x": x.to(dtype), "mask": torch.rand(shape, generator=g, device=device) >= masked}
