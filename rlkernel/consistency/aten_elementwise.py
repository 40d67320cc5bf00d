"""Activations whose last elements torch rounds otherwise than the others, as formulas of such that are alike.

torch's CPU kernels take whole vectors, and what is left at the end of a thread's part one by one: where the
two ways differ in the last place, an element's bits depend on where it stands.  SiLU and GELU are those of
``rlkernel.swiglu``, whose bits no processor changes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.consistency.aten_call import Short, need_floats, put
from rlkernel.ops.swiglu import activated, activated_backward


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return activated(x, "silu")


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return activated_backward(grad, x, "silu")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return activated(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return activated_backward(grad, x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if x.dim() == 0 or x.shape[dim] % 2:
        raise ValueError(f"dim must be one of even size, got dim {dim} of shape {tuple(x.shape)}")
    first, second = x.chunk(2, dim)
    return first, second


def glu(x: Tensor, dim: int = -1) -> Tensor:
    first, second = _halves(x, dim)
    return first * sigmoid(second)


def glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    first, second = _halves(x, dim)
    gate = sigmoid(second)
    return torch.cat([grad * gate, grad * first * gate * (1 - gate)], dim)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(x * beta > threshold, grad, grad * sigmoid(x * beta))


def rsqrt(x: Tensor) -> Tensor:
    """Of the nearest root, as ``rlkernel.rms_norm`` takes it: a library's root of fp32 need not be that, and
    one of fp64 is exact enough to be rounded to it."""
    return torch.sqrt(x.double()).float().reciprocal_()


def _served(
    formula: Callable[..., Tensor], operands: int = 1, *, promotes: bool = False, widens: bool = True
) -> Callable[..., Tensor]:
    """In fp32, rounded once, by the formula itself where it is not to be widened; integers are promoted, or
    are torch's error."""

    def run(
        original: Callable[..., Tensor],
        *args: Any,
        out: Tensor | None = None,
        grad_input: Any = None,
        **kw: Any,
    ) -> Tensor:
        tensors, rest = args[:operands], args[operands:]
        into = out if out is not None else grad_input
        if not tensors[0].is_floating_point() and not promotes:
            into = {} if into is None else {"out" if out is not None else "grad_input": into}
            return original(*args, **kw, **into)
        if not tensors[0].is_floating_point():  # torch's promotion
            tensors = tuple(x.to(torch.get_default_dtype()) for x in tensors)
        need_floats(*tensors)
        if widens or len({x.dtype for x in tensors}) > 1:
            found = formula(*(x.float() for x in tensors), *rest, **kw).to(tensors[0].dtype)
        else:
            found = formula(*tensors, *rest, **kw)
        return found if into is None else put(into, found)

    return run


def _in_place(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(original: Callable[..., Tensor], x: Tensor, *rest: Any, **kw: Any) -> Tensor:
        need_floats(x)
        return x.copy_(formula(x.float(), *rest, **kw))

    return run


SERVED: dict[str, Callable[..., Any]] = {
    **{name: Short(name, _served(f, widens=False)) for f, name in ((silu, "silu"), (gelu, "gelu"))},
    **{f"{name}.out": _served(f, widens=False) for f, name in ((silu, "silu"), (gelu, "gelu"))},
    **{name: _served(sigmoid, promotes=True) for name in ("sigmoid", "sigmoid.out")},
    **{f"{name}_": _in_place(f) for f, name in ((sigmoid, "sigmoid"), (silu, "silu"), (gelu, "gelu"))},
    **{name: _served(glu) for name in ("glu", "glu.out")},
    **{name: _served(glu_backward, 2) for name in ("glu_backward", "glu_backward.grad_input")},
    **{name: _served(softplus) for name in ("softplus", "softplus.out")},
    "rsqrt": Short("rsqrt", _served(rsqrt, promotes=True)),
    "rsqrt.out": _served(rsqrt, promotes=True),
    "rsqrt_": _in_place(rsqrt),
    "silu_backward": _served(silu_backward, 2, widens=False),
    "silu_backward.grad_input": _served(silu_backward, 2, widens=False),
    "gelu_backward": _served(gelu_backward, 2, widens=False),
    "gelu_backward.grad_input": _served(gelu_backward, 2, widens=False),
    "softplus_backward": _served(softplus_backward, 2),
    "softplus_backward.grad_input": _served(softplus_backward, 2),
}
