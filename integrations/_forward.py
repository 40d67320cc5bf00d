"""Another ``forward`` for a module, as long as a block lasts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from rlkernel.integrations._patch import ABSENT


class Standing:
    """``function`` in the place of ``module.name``, which held ``expected`` (``ABSENT``: nothing of its own).

    A copy of the module, and what is loaded from a file of it, have their own back there: a function, which
    copies share, would go on to run the one module's layers for the other, and no file could hold it.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module, name: str, expected: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.module, self.name, self.expected = function, module, name, expected

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # copy and pickle hand on the new module, whose class is all that it has by then
        return (getattr, (self.module, self.name)) if self.expected is ABSENT else (_same, (self.expected,))


def _same(value: Any) -> Any:
    return value


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of ``module``, with all of its hooks, runs ``forward`` in place of its own."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
