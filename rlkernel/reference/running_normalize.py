"""What ``running_normalize`` means, in plain PyTorch."""

import torch
from torch import Tensor

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.reference import unsupported as unsupported
from rlkernel.reference import whiten


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = call.states.new_zeros(3)
    for each in call.states:
        state = _merged(state, each)
    if call.update:
        state = _merged(state, _moments(call.x, call.mask))
    count, mean, squares = state
    variance = torch.where(count < 2, 1.0, whiten._variance(count, squares, call.unbiased))
    return RunningNormalizeResults(whiten._scaled(call.whitening, mean, variance, call.clip), state)


def _moments(x: Tensor, mask: Tensor | None) -> Tensor:
    """Count, mean and sum of squared deviations of what counts, in fp64."""
    wide = x.double()
    kept = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    count = kept.sum().double()
    first = whiten._first(wide, kept)
    mean = first + torch.where(kept, wide - first, 0).sum() / count.clamp(min=1)
    return torch.stack([count, mean, torch.where(kept, (wide - mean).square(), 0).sum()])


def _merged(first: Tensor, second: Tensor) -> Tensor:
    """Of two parts together (Chan, Golub and LeVeque 1979)."""
    count = first[0] + second[0]
    share = second[0] / count.clamp(min=1)
    apart = second[1] - first[1]
    both = torch.stack(
        [count, first[1] + apart * share, first[2] + second[2] + apart * apart * first[0] * share]
    )
    return torch.where(second[0] == 0, first, torch.where(first[0] == 0, second, both))


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    masked: float = 0.2,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.running_normalize`` for ``x`` of ``shape``, after a thousand others."""
    made = whiten.make_inputs(*shape, dtype=dtype, device=device, seed=seed, masked=masked)
    state = torch.tensor([1000.0, 4.0, 9000.0], dtype=torch.float64, device=device)
    return {"x": made["x"], "state": state, "mask": made["mask"]}
