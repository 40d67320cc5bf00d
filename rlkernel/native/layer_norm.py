"""``layer_norm`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch
from torch import Tensor

from rlkernel.calls.layer_norm import LayerNormCall, LayerNormGrads, LayerNormResults
from rlkernel.native import kernels, short_way, taking
from rlkernel.native._rows import dense_like, rows_of

unsupported = taking("x")


def forward(call: LayerNormCall) -> LayerNormResults:
    x = call.x
    normed = dense_like(x)
    mean = rstd = None
    if call.statistics:
        mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    kernels(x.device).layer_norm_forward(
        x=rows_of(x), weight=call.weight, bias=call.bias, eps=call.eps, normed=normed, mean=mean, rstd=rstd
    )
    return LayerNormResults(normed, mean, rstd)


def backward(call: LayerNormCall, results: LayerNormResults, grad_normed: Tensor) -> LayerNormGrads:
    found: LayerNormGrads | None = short_way("layer_norm_backward")((call, results, grad_normed), {})
    if found is not None:
        return found
    x, part, mean, rstd = call.x, kernels(call.x.device), results.mean, results.rstd
    assert mean is not None and rstd is not None
    chunks = -(-rstd.numel() // part.NORM_ROWS)

    def sums(parameter: Tensor | None, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        if parameter is None or not wanted:
            return None, None
        partials = torch.empty(chunks * x.shape[-1], dtype=torch.float32, device=x.device)
        return partials, dense_like(parameter)

    weight_partials, grad_weight = sums(call.weight, call.needs[1])
    bias_partials, grad_bias = sums(call.bias, call.needs[2])
    grad_x = dense_like(x)
    part.layer_norm_backward(
        x=rows_of(x), grad_normed=rows_of(grad_normed), mean=mean, rstd=rstd,
        weight=call.weight, grad_x=grad_x, weight_partials=weight_partials, grad_weight=grad_weight,
        bias_partials=bias_partials, grad_bias=grad_bias,
    )  # fmt: skip
    return LayerNormGrads(grad_x, grad_weight, grad_bias)
