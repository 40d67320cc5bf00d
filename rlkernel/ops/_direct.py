"""The short way of a public function: straight to the compiled kernel where nothing else is to be decided."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from rlkernel import dispatch
from rlkernel.runtime import ranges

F = TypeVar("F", bound=Callable[..., Any])
Short = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def direct(function: F) -> F:
    """``function``, whose calls of plain CPU tensors go to the compiled kernel at once.

    Checks, choice and record take longer than a small kernel.  Where no setting is on and every argument is
    as it mostly is, C++ looks at them and makes the result, or, where a backward may follow, what the ``op``
    of the function's module connects with its sources; all other calls are declined there and take
    ``function``, which also words the errors.
    """
    op, names = function.__name__, inspect.unwrap(function).__globals__
    short: Short = _declined
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # the long way names what it runs in a profile
        if is_compiling() or profiler._is_profiler_enabled or ranges.nvtx:
            return function(*args, **kwargs)
        found = short(args, kwargs)
        if found is None:
            return function(*args, **kwargs)
        return names["op"].connected(found)[0] if type(found) is list else found

    def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The extension is loaded when it is needed, and not before."""
        nonlocal short
        short = dispatch.direct(op) or _declined
        return short(args, kwargs)

    short = first
    return call  # type: ignore[return-value]


def _declined(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None
