"""What ``value_loss`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.value_loss import ValueLossCall, ValueLossResults
from rlkernel.reference import unsupported as unsupported


def forward(call: ValueLossCall) -> ValueLossResults:
    values, cu_seqlens, huber_delta = call.values, call.cu_seqlens, call.huber_delta
    dtype = torch.promote_types(values.dtype, torch.float32)
    v, target = values.to(dtype), call.returns.to(dtype)
    kept = call.mask & _inside(values, cu_seqlens)
    difference = v - target
    losses, slope = _loss(difference, huber_delta)
    clipped = torch.zeros_like(kept)
    if call.old_values is not None:
        old = call.old_values.to(dtype)
        bounded = torch.max(torch.min(v, old + call.cliprange), old - call.cliprange)
        other, _ = _loss(bounded - target, huber_delta)
        clipped = other > losses
        # where the clipped loss is the larger one, the value lies outside the range: it moves nothing
        slope = torch.where(clipped, 0, torch.where(other.isnan(), other, slope))
        losses = torch.max(losses, other)
    slope = torch.where(kept, slope, 0)
    losses = torch.where(kept, losses, 0)

    counts, sums = _sums(kept.to(dtype), cu_seqlens), _sums(losses, cu_seqlens)
    sequences = (counts > 0).to(dtype)
    share = sequences / counts.clamp(min=1) if call.unit == "mean" else sequences
    items = call.num_items
    if items is None:
        items = counts.sum() if call.unit == "token" else sequences.sum()
    weight = torch.as_tensor(call.factor, dtype=dtype, device=v.device) / items
    weight = torch.where(counts.sum() > 0, weight, 0)
    scale = weight * share
    metrics = _metrics(kept, losses, clipped, target, -difference)
    loss = weight * (sums * share).sum()
    return ValueLossResults(loss, metrics, slope if call.slopes else None, scale)


def backward(call: ValueLossCall, results: ValueLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    """The gradient of the values, in their dtype."""
    slope, cu_seqlens = results.slope, call.cu_seqlens
    assert slope is not None
    factor = grad_loss * results.scale
    if cu_seqlens is None:
        factor = factor[:, None]
    else:
        padding = factor.new_zeros(1)  # the slope behind the last sequence is 0
        factor = torch.cat([factor, padding])[_sequence_of(slope, cu_seqlens)]
    return ((slope * factor).to(call.dtype),)


def _loss(difference: Tensor, huber_delta: float | None) -> tuple[Tensor, Tensor]:
    """Of each token, and its derivative."""
    square = 0.5 * difference**2
    if huber_delta is None:
        return square, difference
    size = difference.abs()
    linear = huber_delta * (size - 0.5 * huber_delta)
    return torch.where(size < huber_delta, square, linear), difference.clamp(-huber_delta, huber_delta)


def _sequence_of(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The index of each packed token's sequence; one more than the last for what stands behind them."""
    places = torch.arange(x.shape[0], device=x.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64).contiguous(), places, right=True)


def _inside(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.arange(x.shape[0], device=x.device) < cu_seqlens[-1]


def _sums(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """One sum per sequence."""
    if cu_seqlens is None:
        return x.sum(-1)
    sums = x.new_zeros(cu_seqlens.shape[0])
    return sums.index_add_(0, _sequence_of(x, cu_seqlens), x)[:-1]


def _metrics(kept: Tensor, losses: Tensor, clipped: Tensor, target: Tensor, error: Tensor) -> Tensor:
    count = kept.sum().to(target.dtype)
    least = count.clamp(min=1)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, from deviations from a token: of equal values they are exactly 0."""
        if x.numel() == 0:
            return count, count
        first = x.flatten().gather(0, kept.flatten().to(torch.int8).argmax(0, keepdim=True))[0]
        d = torch.where(kept, x - first, 0)
        mean = d.sum() / least
        variance = torch.where(kept, (d - mean) ** 2, 0).sum() / least
        return torch.where(count > 0, first + mean, 0), torch.where(count > 0, variance, 0)

    return_mean, return_variance = moments(target)
    error_mean, error_variance = moments(error)
    explained = torch.where(return_variance > 0, 1 - error_variance / return_variance, torch.nan)
    return torch.stack(
        [
            count,
            (kept & ~losses.isfinite()).sum(),
            (kept & clipped).sum() / least,
            return_mean - error_mean,
            return_mean,
            return_variance,
            error_mean,
            error_variance,
            explained,
        ]
    ).to(target.dtype)


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    masked: float = 0.25,
    packed: bool = False,
    clipped: bool = False,
    spread: float = 0.3,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.value_loss`` for [B, L] tokens, or as many packed ones: answers of
    different lengths with tool tokens among them, values that moved about ``spread`` since the rollout.
    ``clipped`` adds ``old_values``, which want a ``cliprange_value`` beside them."""
    g = torch.Generator(device).manual_seed(seed)
    batch, length = shape

    def noise() -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float32, device=device)

    old_values = noise()
    values, returns = old_values + spread * noise(), old_values + noise()
    lengths = (
        length - (torch.rand(batch, generator=g, dtype=torch.float32, device=device) * masked * length).long()
    )
    inside = torch.arange(length, device=device) < lengths[:, None]
    mask = inside & (torch.rand(shape, generator=g, dtype=torch.float32, device=device) >= masked / 2)
    inputs = {"values": values, "returns": returns, "mask": mask}
    if clipped:
        inputs["old_values"] = old_values
    if packed:
        inputs = {name: x[inside] for name, x in inputs.items()}
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        inputs["cu_seqlens"] = starts.to(torch.int32)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
