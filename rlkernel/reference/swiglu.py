"""What ``swiglu`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.calls.swiglu import SwigluCall, SwigluGrads, SwigluResults, halves
from rlkernel.reference import unsupported as unsupported


def forward(call: SwigluCall) -> SwigluResults:
    gate, up, wide = _wide(call)
    return SwigluResults(_product(_activated(gate, call), up, call).to(call.gate.dtype))


def backward(call: SwigluCall, grad_product: Tensor) -> SwigluGrads:
    gate, up, wide = _wide(call)
    g = grad_product.to(wide)
    of_gate = (g if up is None else _rounded(g * up, call)) * _slope(gate, call.activation)
    of_up = g * _rounded(_activated(gate, call), call)
    if call.packed:
        return SwigluGrads(torch.cat([of_gate, of_up], -1).to(call.gate.dtype), None)
    wanted = (
        x.to(call.gate.dtype) if need else None for x, need in zip((of_gate, of_up), call.needs, strict=True)
    )
    return SwigluGrads(*wanted)


def _wide(call: SwigluCall) -> tuple[Tensor, Tensor | None, torch.dtype]:
    wide = torch.promote_types(call.gate.dtype, torch.float32)
    gate, up = halves(call.gate) if call.packed else (call.gate, call.up)
    return gate.to(wide), None if up is None else up.to(wide), wide


def _rounded(x: Tensor, call: SwigluCall) -> Tensor:
    return x.to(call.gate.dtype).to(x.dtype) if call.rounding == "before_product" else x


def _product(activated: Tensor, up: Tensor | None, call: SwigluCall) -> Tensor:
    return activated if up is None else _rounded(activated, call) * up


def _activated(x: Tensor, call: SwigluCall) -> Tensor:
    if call.activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if call.activation == "gelu_tanh" else "none")


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative, each form without a difference of equals."""
    if activation == "gelu":
        return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    z, inner = x, torch.ones_like(x)
    if activation == "gelu_tanh":
        scale = 2 * math.sqrt(2 / math.pi)
        z, inner = scale * (x + 0.044715 * x**3), scale * (1 + 3 * 0.044715 * x.square())
    return torch.sigmoid(z) * (1 + x * torch.sigmoid(-z) * inner)


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    packed: bool = False,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.swiglu`` for ``gate`` and ``up`` of ``shape``."""
    g = torch.Generator(device).manual_seed(seed)
    gate, up = (torch.randn(shape, generator=g, dtype=torch.float32, device=device) * size for size in (3, 1))
    if packed:
        return {"gate": torch.cat([gate, up], -1).to(dtype)}
    return {"gate": gate.to(dtype), "up": up.to(dtype)}
