"""What ``rms_norm`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.rms_norm import RmsNormCall, RmsNormGrads, RmsNormResults
from rlkernel.reference import unsupported as unsupported


def forward(call: RmsNormCall) -> RmsNormResults:
    x, wide = call.x, torch.promote_types(call.x.dtype, torch.float32)
    summed = None if call.residual is None else x + call.residual
    h = (x if summed is None else summed).to(wide)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + call.eps)
    normed = h * rstd
    if call.weight is not None:
        if call.rounding == "before_weight":
            normed = normed.to(x.dtype).to(wide)
        normed = normed * (call.weight.to(wide) + call.weight_offset)
    return RmsNormResults(normed.to(x.dtype), summed, rstd.squeeze(-1) if call.statistics else None)


def backward(call: RmsNormCall, results: RmsNormResults, grads: RmsNormGrads) -> tuple[Tensor, Tensor | None]:
    """The gradients of what was normed and of the weight, each in its dtype; roundings have none."""
    h = call.x if results.summed is None else results.summed
    wide = torch.promote_types(h.dtype, torch.float32)
    assert results.rstd is not None
    rstd = results.rstd.unsqueeze(-1)
    normed, g = h.to(wide) * rstd, grads.normed.to(wide)
    scaled = g if call.weight is None else g * (call.weight.to(wide) + call.weight_offset)
    grad_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grads.summed is not None:
        grad_x = grad_x + grads.summed
    grad_weight = None
    if call.weight is not None and call.needs[2]:
        grad_weight = (g * normed).reshape(-1, h.shape[-1]).sum(0).to(call.weight.dtype)
    return grad_x.to(h.dtype), grad_weight


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    residual: bool = False,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.rms_norm`` for ``x`` of ``shape``: rows of different magnitude."""
    g = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float32, device=device)

    size = 2.0 ** noise(*shape[:-1], 1)
    inputs = {"x": noise(*shape) * size, "weight": 1 + 0.2 * noise(shape[-1])}
    if residual:
        inputs["residual"] = noise(*shape) * size
    return {name: x.to(dtype) for name, x in inputs.items()}
