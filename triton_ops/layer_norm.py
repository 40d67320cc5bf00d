"""``layer_norm`` over Triton: one launch forward; one backward, and up to three for weight and bias."""

import torch
from torch import Tensor

from rlkernel.calls.layer_norm import LayerNormCall, LayerNormGrads, LayerNormResults
from rlkernel.triton_ops import layer_norm_kernels as kernels
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops.rms_norm import CHUNK_PLAN, grid_of_chunks, plan_of, rows_of, total_of

unsupported = taking("x")


def forward(call: LayerNormCall) -> LayerNormResults:
    x, length = call.x, call.x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = rstd = None
    if call.statistics:
        mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        with torch.cuda.device_of(x):
            kernels.layer_forward_kernel[(x.numel() // length,)](
                *rows_of(x), call.weight, call.bias, call.eps, normed, mean, rstd, length, **plan_of(length)
            )
    return LayerNormResults(normed, mean, rstd)


def backward(call: LayerNormCall, results: LayerNormResults, grad_normed: Tensor) -> LayerNormGrads:
    x, mean, rstd, weight, bias = call.x, results.mean, results.rstd, call.weight, call.bias
    assert mean is not None and rstd is not None
    length, rows = x.shape[-1], rstd.numel()
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    of_x, of_grad = rows_of(x), rows_of(grad_normed)

    def partials(wanted: bool) -> Tensor | None:
        chunks = -(-rows // CHUNK_PLAN["CHUNK_ROWS"])
        return torch.empty(chunks, length, dtype=torch.float32, device=x.device) if wanted else None

    of_weight = partials(weight is not None and call.needs[1])
    of_bias = partials(bias is not None and call.needs[2])
    grad_weight = grad_bias = None
    with torch.cuda.device_of(x):
        if rows:
            kernels.layer_backward_kernel[(rows,)](
                *of_x, *of_grad, mean, rstd, weight, grad_x, length, **plan_of(length)
            )
            some = of_weight if of_weight is not None else of_bias
            if some is not None:
                kernels.layer_sums_kernel[grid_of_chunks(some)](
                    *of_x, *of_grad, mean, rstd, of_weight, of_bias, rows, length, **CHUNK_PLAN
                )
        if of_weight is not None and weight is not None:
            grad_weight = total_of(of_weight, rows, weight)
        if of_bias is not None and bias is not None:
            grad_bias = total_of(of_bias, rows, bias)
    return LayerNormGrads(grad_x, grad_weight, grad_bias)
