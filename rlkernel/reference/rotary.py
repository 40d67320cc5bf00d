"""What ``rotary`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.rotary import RotaryCall, RotaryGrads, RotaryResults
from rlkernel.reference import unsupported as unsupported


def forward(call: RotaryCall) -> RotaryResults:
    def turned(x: Tensor) -> Tensor:
        part = x[..., : call.rotary_dim]
        cos, sin, part = _operands(call, part)
        y = part * cos + _partners(part, call.interleaved) * sin
        return _as_lies(x, y, call)

    return RotaryResults(turned(call.q), None if call.k is None else turned(call.k))


def backward(call: RotaryCall, grads: RotaryGrads) -> RotaryGrads:
    def turned_back(g: Tensor | None, wanted: bool) -> Tensor | None:
        if g is None or not wanted:
            return None
        part = g[..., : call.rotary_dim]
        cos, sin, part = _operands(call, part)
        back = part * cos - _partners(part * sin, call.interleaved)
        return _as_lies(g, back, call)

    return RotaryGrads(turned_back(grads.q, call.needs[0]), turned_back(grads.k, call.needs[1]))


def _as_lies(x: Tensor, turned: Tensor, call: RotaryCall) -> Tensor:
    """With what does not turn, in the memory layout of x."""
    return torch.empty_like(x).copy_(torch.cat([turned.to(x.dtype), x[..., call.rotary_dim :]], -1))


def _operands(call: RotaryCall, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """cos and sin for each element of x, and x, in the dtype that is computed in."""
    dtype = x.dtype if call.rounding == "before_sum" else torch.promote_types(x.dtype, torch.float32)

    def spread(table: Tensor) -> Tensor:
        if call.positions is not None:
            table = table[call.positions]
        if table.shape[-1] != call.rotary_dim:
            table = table.repeat_interleave(2, -1) if call.interleaved else torch.cat([table, table], -1)
        return table.to(dtype).unsqueeze(call.heads)

    return spread(call.cos), spread(call.sin), x.to(dtype)


def _partners(x: Tensor, interleaved: bool) -> Tensor:
    """The other of each pair: of the first the second with the sign turned, of the second the first."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def make_inputs(
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    rotary_dim: int | None = None,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.rotary`` as transformers has them: q [B, H, T, D], a transposed view,
    and cos [B, T, R]; ``packed``: q [B * T, H, D] and cos [B * T, R]."""
    g = torch.Generator(device).manual_seed(seed)
    turning = rotary_dim or head_dim

    def noise(count: int) -> Tensor:
        x = torch.randn(batch, tokens, count, head_dim, generator=g, dtype=torch.float32, device=device).to(
            dtype
        )
        return x.flatten(0, 1) if packed else x.transpose(1, 2)

    start = torch.randint(0, 500, (batch, 1), generator=g, device=device)
    frequency = 10000.0 ** (-torch.arange(0, turning, 2, device=device) / turning)
    angles = (start + torch.arange(tokens, device=device)).unsqueeze(-1) * frequency
    angles = torch.cat([angles, angles], -1)
    angles = angles.flatten(0, 1) if packed else angles
    return {
        "q": noise(heads),
        "k": noise(kv_heads or heads),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
    }
