"""``rotary`` over Triton: a launch for the queries and one for the keys, each way."""

import torch
from torch import Tensor

from rlkernel.calls.rotary import RotaryCall, RotaryGrads, RotaryResults
from rlkernel.triton_ops._device import taking
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2
from rlkernel.triton_ops.rotary_kernels import rotary_kernel

unsupported = taking("q")

HEADS = 4  # that a program takes


def forward(call: RotaryCall) -> RotaryResults:
    def turned(x: Tensor) -> Tensor:
        return _turn(call, x, x if call.inplace else torch.empty_like(x), inverse=False)

    return RotaryResults(turned(call.q), None if call.k is None else turned(call.k))


def backward(call: RotaryCall, grads: RotaryGrads) -> RotaryGrads:
    def turned(g: Tensor | None, wanted: bool) -> Tensor | None:
        if g is None or not wanted:
            return None
        g = g if g.stride(-1) == 1 else g.contiguous()
        return _turn(call, g, torch.empty_like(g), inverse=True)

    return RotaryGrads(turned(grads.q, call.needs[0]), turned(grads.k, call.needs[1]))


def _turn(call: RotaryCall, x: Tensor, out: Tensor, inverse: bool) -> Tensor:
    if not x.numel():
        return out
    rest = 0 if out is x else x.shape[-1] - call.rotary_dim
    tokens = [d for d in range(x.dim() - 1) if d != call.heads]
    heads, inner = x.shape[call.heads], x.shape[tokens[-1]]

    def strides(t: Tensor) -> tuple[int, int, int]:
        return t.stride(tokens[0]) if len(tokens) > 1 else 0, t.stride(tokens[-1]), t.stride(call.heads)

    def table(t: Tensor) -> tuple[Tensor, int, int]:
        return t, t.stride(0), t.stride(-2)

    count = x.numel() // (heads * x.shape[-1])
    with torch.cuda.device_of(x):
        rotary_kernel[(count * cdiv(heads, HEADS),)](
            x, *strides(x), out, *strides(out), *table(call.cos), *table(call.sin), call.positions, inner,
            heads, ROTARY_DIM=call.rotary_dim, REST=rest, HALF_TABLE=call.cos.shape[-1] != call.rotary_dim,
            INTERLEAVED=call.interleaved, ROUND_EACH=call.rounding == "before_sum", INVERSE=inverse,
            PAIRS=next_power_of_2(call.rotary_dim // 2),
            MORE=next_power_of_2(rest) if rest else 0, HEADS=HEADS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
