"""The product of a gated MLP: an activation of the gate, times the other projection."""

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.swiglu import ACTIVATIONS, ROUNDINGS, SwigluCall, SwigluResults
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._direct import direct
from rlkernel.ops._typed import typed
from rlkernel.runtime import ranges
from rlkernel.types import Activation, SwigluRounding


@direct
@typed
def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation = "silu",
    rounding: SwigluRounding = "before_product",
) -> Tensor:
    """Activate the gate of a gated MLP and multiply it with the other projection.

    Equal to, in fp32,

        activated = silu(gate)                  rounded to gate's dtype here, "before_product",
        activated * up                          and here; "after_product": here alone

    where without ``up`` the last dimension of ``gate`` holds the two, one behind the other.  Differentiable
    in ``gate`` and ``up``; the gradients are rounded where those of the composition are.

    An element's bits depend on the element alone: not on its place, the shape, the memory layout or the
    number of threads (batch-invariant).  Under ``rlkernel.batch_invariant`` they are the composition's.

    Args:
        gate: [..., I], or [..., 2 I] without ``up``: fp16, bf16, fp32 or fp64, any strides on the leading
            dimensions: halves of a wider tensor are not copied.
        up: as ``gate``, of its dtype.
        activation: ``"silu"``; ``"gelu"``, by the error function; or ``"gelu_tanh"``, by the hyperbolic
            tangent, as Gemma.
        rounding: where a narrow dtype is rounded to: ``"before_product"`` as transformers, Liger and vLLM's
            ``SiluAndMul``, the activated gate and then the product; or ``"after_product"``, the product
            alone.

    Returns:
        [..., I] of ``gate``'s dtype.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows ``LlamaMLP`` and ``GemmaMLP`` of transformers, and ``SiluAndMul`` and ``GeluAndMul`` of vLLM.

    Examples:
        >>> rlkernel.swiglu(torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 2.0]]))
        tensor([[0.0000, 1.4621]])
    """
    _validate.floating("gate", gate)
    if gate.dim() == 0:
        raise ValueError("gate must be [..., I], got ()")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"gate must be [..., 2 I] without up, got {tuple(gate.shape)}")
    else:
        _validate.like("up", up, "gate", gate)
        _validate.same_dtype("up", up, "gate", gate)
        up = _validate.rows(up, gate.dtype)
    _validate.choice("activation", activation, ACTIVATIONS)
    _validate.choice("rounding", rounding, ROUNDINGS)
    return op(SwigluCall(_validate.rows(gate, gate.dtype), up, activation, rounding, up is None))[0]


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation alone with the bits that ``swiglu`` gives it, below autograd."""
    if x.dim() == 0:
        return activated(x[None], activation)[0]
    impl = dispatch.pick("swiglu", x)
    with ranges.of("swiglu", impl):
        found: Tensor = impl.forward(_alone(x, activation)).product
    return found


def activated_backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of ``x`` from that of ``activated(x)``."""
    if x.dim() == 0:
        return activated_backward(grad[None], x[None], activation)[0]
    impl = dispatch.pick("swiglu", x)
    with ranges.of("swiglu", impl, backward=True):
        found: Tensor = impl.backward(_alone(x, activation), grad).gate
    return found


def _alone(x: Tensor, activation: str) -> SwigluCall:
    return SwigluCall(x, None, activation, "before_product", needs=(True, False))


def _like(call: SwigluCall) -> SwigluResults:
    gate = call.gate
    length = gate.shape[-1] // 2 if call.packed else gate.shape[-1]
    return SwigluResults(torch.empty((*gate.shape[:-1], length), dtype=gate.dtype, device=gate.device))


op = Op(
    "swiglu",
    SwigluCall,
    SwigluResults,
    pick=("gate",),
    backward=lambda impl, call, results, grads: impl.backward(call, grads[0]),
    like=_like,
    gradients=("gate", "up"),
    differentiable=("product",),
    saves=("gate", "up"),
)
