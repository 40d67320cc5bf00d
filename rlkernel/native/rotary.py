"""``rotary`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device."""

import torch
from torch import Tensor

from rlkernel.calls.rotary import RotaryCall, RotaryGrads, RotaryResults
from rlkernel.native import kernels, taking

unsupported = taking("q")


def forward(call: RotaryCall) -> RotaryResults:
    q, k = call.q, call.k
    if call.inplace:
        return RotaryResults(*_turn(call, q, k, q, k))
    return RotaryResults(*_turn(call, q, k, torch.empty_like(q), None if k is None else torch.empty_like(k)))


def backward(call: RotaryCall, grads: RotaryGrads) -> RotaryGrads:
    q, k = (
        None if g is None or not need else g if g.stride(-1) == 1 else g.contiguous()
        for g, need in zip(grads, call.needs, strict=True)
    )
    if q is None:
        found = None if k is None else _turn(call, k, None, torch.empty_like(k), None, inverse=True)[0]
        return RotaryGrads(None, found)
    out_k = None if k is None else torch.empty_like(k)
    return RotaryGrads(*_turn(call, q, k, torch.empty_like(q), out_k, inverse=True))


def _turn(
    call: RotaryCall, q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None, inverse: bool = False
) -> tuple[Tensor, Tensor | None]:
    kernels(q.device).rotary(
        q=q, k=k, cos=call.cos, sin=call.sin, positions=call.positions, heads=call.heads,
        rotary_dim=call.rotary_dim, interleaved=call.interleaved, round_each=call.rounding == "before_sum",
        inverse=inverse, out_q=out_q, out_k=out_k,
    )  # fmt: skip
    return out_q, out_k
