"""What a layer saw in its forward pass, when gradient checkpointing computes it again in backward.

Backward may run when the context of the forward pass is over, or inside another one, and after passes over
other micro-batches.  So the call that a checkpoint keeps is bound to what was in place when it was made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlkernel.integrations._patch import ABSENT

# where transformers' layers, and torch's wrapper of others, keep the function that checkpoints them
FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
_calls = threading.local()  # backward runs each device in a thread of its own


def checkpoints(model: nn.Module) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """The modules that may be checkpointed, the attribute that holds the function, and the function."""
    return [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in FUNCTIONS
        if callable(vars(module).get(name))
    ]


def bound(function: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    """``function(call, *args)`` of a checkpoint, with ``call`` bound to what ``layer`` has in place."""

    @functools.wraps(function)
    def checkpoint(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(_Bound(call, layer), *args, **kwargs)

    return checkpoint


def notes() -> dict[Any, Any] | None:
    """What the running checkpointed call keeps for when it runs again; None outside of one."""
    stack: list[_Bound] = getattr(_calls, "stack", [])
    return stack[-1].notes if stack else None


def again() -> bool:
    """Whether a checkpointed call runs again."""
    stack: list[_Bound] = getattr(_calls, "stack", [])
    return bool(stack) and stack[-1].runs > 1


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Bound:
    def __init__(self, call: Callable[..., Any], layer: nn.Module) -> None:
        self.call = call
        self.notes: dict[Any, Any] = {}
        self.runs = 0
        self.forwards = [
            (module, vars(module)["forward"]) for module in layer.modules() if "forward" in vars(module)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        stack = _calls.stack = [*getattr(_calls, "stack", []), self]
        try:
            if self.runs == 1:
                return self.call(*args, **kwargs)
            with _in_place(self.forwards):
                return self.call(*args, **kwargs)
        finally:
            _calls.stack = stack[:-1]


@contextmanager
def _in_place(forwards: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Inside, the modules have the ``forward`` that they had."""
    former = [(module, vars(module).get("forward", ABSENT)) for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for module, forward in former:
            if forward is ABSENT:
                del module.forward
            else:
                module.forward = forward
