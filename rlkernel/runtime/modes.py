"""Modes of torch, entered only where they would change something: each is microseconds of Python."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def once_differentiable(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``backward(ctx, saved_tensors, *grads)`` of ``op``: its gradients have no derivative.

    Under ``create_graph`` torch's decorator of this name makes leaves of the gradients, and none at all where
    the upstream gradient is a constant, as that of a loss is: a gradient penalty is then silently lost.  Here
    the gradients stay connected to whatever the op depends on, and raise when they are differentiated.

    What connects them is a saved tensor, an input or an output of the op; a loss that saves neither saves an
    ``anchor``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(ctx: Any, *grads: Any) -> Any:
            for g in grads:
                if g is not None:
                    break
            else:
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors  # once: checkpointing recomputes a tensor for each time
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            return _refusing(op, found, (*_tensors(grads), *_tensors(saved)))

        return call

    return decorate


def anchor(x: Tensor) -> Tensor:
    """One more output of an autograd function, to save: it holds no memory, and leads to all its inputs."""
    return x.new_empty(0)


def _tensors(values: Any) -> list[Tensor]:
    """Those that are differentiable, also of a list that a custom op has as one argument."""
    flat = (y for x in values for y in (x if isinstance(x, (list, tuple)) else (x,)))
    return [x for x in flat if isinstance(x, Tensor) and x.requires_grad]


def _refusing(op: str, found: Any, sources: tuple[Tensor, ...]) -> Any:
    grads = found if isinstance(found, tuple) else (found,)
    there = [i for i, g in enumerate(grads) if isinstance(g, Tensor)]
    joined = dict(
        zip(there, _Refuse.apply(op, len(there), *(grads[i] for i in there), *sources), strict=True)
    )
    result = tuple(joined.get(i, g) for i, g in enumerate(grads))
    return result if isinstance(found, tuple) else result[0]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.op} has no second derivative: its gradient must not be differentiated again, "
            "as by a gradient penalty over create_graph=True"
        )


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for ``device``; ``meta`` has none, and torch raises when asked."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if autocasts(device) else _NOTHING
