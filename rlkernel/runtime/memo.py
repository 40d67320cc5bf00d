"""Keeps what was made of arguments that are plain values."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_PLAIN = frozenset({str, int, float, bool, type(None)})


def remembered(build: Callable[..., T]) -> Callable[..., T]:
    """``build``, called once for keyword arguments of the same values and types; what it raises is not kept.

    Arguments that are no plain values, or tuples of them, could change without becoming another key: for
    those it is called every time.
    """
    # for the types: 1, 1.0 and True are one key, but not one argument
    kept = functools.lru_cache(maxsize=256)(lambda types, **arguments: build(**arguments))

    @functools.wraps(build)
    def call(**arguments: Any) -> T:
        if torch.compiler.is_compiling():
            return build(**arguments)
        types = _types(arguments.values())
        return build(**arguments) if types is None else kept(types, **arguments)

    return call


def _types(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """The types of ``values``, and of what tuples among them hold; None where one is not plain."""
    types = tuple(map(type, values))
    if _PLAIN.issuperset(types):
        return types
    found: list[Any] = [types]
    for x in values:
        if type(x) not in _PLAIN:
            inner = _types(x) if isinstance(x, tuple) else None
            if inner is None:
                return None
            found.append(inner)
    return tuple(found)
