"""Modes of torch, entered only where they would change something: each is microseconds of Python."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function

_NOTHING = contextlib.nullcontext()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator, for a backward pass that is itself recorded (``create_graph``)."""
    recorded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return recorded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING
