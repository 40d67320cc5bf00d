"""What ``layer_norm`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.layer_norm import LayerNormCall, LayerNormGrads, LayerNormResults
from rlkernel.reference import unsupported as unsupported


def forward(call: LayerNormCall) -> LayerNormResults:
    x = call.x
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    mean = h.mean(-1, keepdim=True)
    shift = (h - mean).mean(-1, keepdim=True)  # what rounding took from the mean
    centred, mean = (h - mean) - shift, mean + shift
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + call.eps)
    normed = centred * rstd
    if call.weight is not None:
        normed = normed * call.weight.to(wide)
    if call.bias is not None:
        normed = normed + call.bias.to(wide)
    statistics = (mean.squeeze(-1), rstd.squeeze(-1)) if call.statistics else (None, None)
    return LayerNormResults(normed.to(x.dtype), *statistics)


def backward(call: LayerNormCall, results: LayerNormResults, grad_normed: Tensor) -> LayerNormGrads:
    x, weight, bias = call.x, call.weight, call.bias
    wide = torch.promote_types(x.dtype, torch.float32)
    assert results.mean is not None and results.rstd is not None
    rstd = results.rstd.unsqueeze(-1)
    normed, g = (x.to(wide) - results.mean.unsqueeze(-1)) * rstd, grad_normed.to(wide)
    scaled = g if weight is None else g * weight.to(wide)
    along = (scaled * normed).mean(-1, keepdim=True)
    grad_x = (scaled - scaled.mean(-1, keepdim=True) - normed * along) * rstd

    def over_rows(terms: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor | None:
        if parameter is None or not wanted:
            return None
        return terms.reshape(-1, x.shape[-1]).sum(0).to(parameter.dtype)

    of_weight, of_bias = over_rows(g * normed, weight, call.needs[1]), over_rows(g, bias, call.needs[2])
    return LayerNormGrads(grad_x.to(x.dtype), of_weight, of_bias)


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    bias: bool = True,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.layer_norm`` for ``x`` of ``shape``: rows of different magnitude, with
    a mean."""
    g = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float32, device=device)

    rows = (*shape[:-1], 1)
    inputs = {
        "x": (noise(*shape) + 3 * noise(*rows)) * 2.0 ** noise(*rows),
        "weight": 1 + 0.2 * noise(shape[-1]),
    }
    if bias:
        inputs["bias"] = 0.2 * noise(shape[-1])
    return {name: x.to(dtype) for name, x in inputs.items()}
