"""Ops that torch.compile must not look into: they hand addresses of tensors to compiled kernels."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """``torch.compiler.disable(function)``, without importing Dynamo where nobody compiles.

    A compiled caller calls ``function`` between two graphs; ``fullgraph=True`` refuses, with Dynamo's error.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
