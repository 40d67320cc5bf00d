"""What ``matmul`` means, in plain PyTorch; its bits are those of torch's library, which promises none."""

import torch
from torch import Tensor

from rlkernel.calls.matmul import MatmulCall, MatmulGrads, MatmulResults
from rlkernel.reference import unsupported as unsupported


def forward(call: MatmulCall) -> MatmulResults:
    out = _summed(_wide(call.a), _wide(call.b), call.segments)
    if call.bias is not None:
        out = out + call.bias.to(out.dtype)
    return MatmulResults(out.to(call.out_dtype))


def backward(call: MatmulCall, results: MatmulResults, grad: Tensor) -> MatmulGrads:
    a, b, bias = call.a, call.b, call.bias
    need_a, need_b, need_bias = call.needs
    upstream = _wide(grad)
    return MatmulGrads(
        _summed(upstream, _wide(b).mT, call.grad_segments).to(a.dtype) if need_a else None,
        (_wide(a).mT @ upstream).to(b.dtype) if need_b else None,
        upstream.sum((0, 1)).to(bias.dtype) if need_bias and bias is not None else None,
    )


def _summed(a: Tensor, b: Tensor, segments: int) -> Tensor:
    if segments == 1:
        return a @ b
    half = a.shape[-1] // 2
    first = _summed(a[..., :half], b[..., :half, :], segments // 2)
    return first + _summed(a[..., half:], b[..., half:, :], segments // 2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def make_inputs(
    rows: int,
    inner: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.matmul``: ``b`` is a linear layer's weight, transposed."""
    g = torch.Generator(device).manual_seed(seed)
    a = torch.randn(rows, inner, generator=g, dtype=torch.float32, device=device)
    weight = (
        torch.randn(columns, inner, generator=g, dtype=torch.float32, device=device) / max(inner, 1) ** 0.5
    )
    return {"a": a.to(dtype), "b": weight.to(dtype).t()}
