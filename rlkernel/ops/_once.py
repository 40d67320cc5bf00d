"""``once_differentiable`` for a backward pass that is not itself recorded, which is nearly every one."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator, past which a pass without ``create_graph`` goes: it is microseconds of Python."""
    recorded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return recorded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call
