"""The types that the annotations of a public function name, looked at in every call."""

import functools
import inspect
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {
    Tensor: "a tensor",
    float: "a number",
    int: "an integer of 64 bits",
    bool: "True or False",
    type(None): "None",
}


def typed(function: F, options: Callable[..., Any] | None = None) -> F:
    """``function``, which raises ValueError for an argument that is not what its annotation says.

    Tensors, numbers, integers and flags are looked at, in eager mode; numbers of NumPy become Python's.  What
    is a name, a sequence or a record stays the function's affair, as all values do.
    ``options``: the function that takes the keywords that this one hands on.
    """
    parameters = inspect.signature(function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    wanted = _wanted(function) if options is None else _wanted(options) | _wanted(function)
    places = tuple(wanted.get(name) for name in names)
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        for value, kinds in zip(args, places, strict=False):
            if kinds is not None and (type(value) not in kinds or type(value) is int):
                args = tuple(map(_looked_at, names, args, places)) + args[len(places) :]
                break
        for name, value in kwargs.items():
            kinds = wanted.get(name)
            if kinds is not None and (type(value) not in kinds or type(value) is int):
                kwargs[name] = _looked_at(name, value, kinds)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _looked_at(name: str, value: Any, kinds: tuple[type, ...] | None) -> Any:
    kind = type(value)
    if kinds is None or (kind in kinds and (kind is not int or _fits(name, value))):
        return value
    return _converted(name, value, kinds)


def _fits(name: str, value: int) -> bool:
    """Whether it has 64 bits; a seed's may have no sign."""
    return -(2**63) <= value < (2**64 if name == "seed" else 2**63)


def _wanted(function: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """The types of the arguments whose annotations name none but those of ``_WORDS``."""
    found = {}
    for name, hint in typing.get_type_hints(function).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)  # and not a sequence of one
        kinds = typing.get_args(hint) if is_union else (hint,)
        if name != "return" and all(kind in _WORDS for kind in kinds):
            found[name] = kinds
    return found


def _converted(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """``value``, or the number of Python that equals it; raises ValueError."""
    if isinstance(value, Tensor):
        if Tensor in kinds:
            return value
    elif isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # NumPy's
        if bool in kinds:
            return bool(value)
    elif isinstance(value, numbers.Integral):
        number = int(value)
        if (int in kinds or float in kinds) and _fits(name, number):
            return number
        if float in kinds:
            return (
                float(number) if abs(number) < sys.float_info.max else math.inf if number > 0 else -math.inf
            )
    elif isinstance(value, numbers.Real) and float in kinds:
        return float(value)
    want = " or ".join(_WORDS[kind] for kind in kinds)
    is_number = isinstance(value, numbers.Number) and not isinstance(value, bool)
    got = value if is_number else type(value).__name__
    raise ValueError(f"{name} must be {want}, got {got}")
