"""Records as the arguments of a custom op: flat, by name, each of a kind that torch's schemas have."""

import typing
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_KINDS = {Tensor: "Tensor", float: "float", int: "int", bool: "bool", str: "str", torch.dtype: "ScalarType"}


class Part(NamedTuple):
    """One argument of a record: the slots that it takes in the schema, there and back.

    ``made(it, False)`` reads no tensor: an object that one tells is then left as the tensor.
    """

    slots: tuple[str, ...]  # each a kind and a name
    flat: Callable[[Any], Iterator[Any]]
    made: Callable[[Iterator[Any], bool], Any]


def part_of(name: str, hint: Any) -> Part:
    """How an argument ``name`` with the annotation ``hint`` crosses.

    A record crosses as its fields, and ``float | Tensor`` as a number and a tensor of which one counts.

    Raises:
        TypeError: no schema has such an argument.
    """
    if hasattr(hint, "_fields"):
        return _record(name, hint)
    if is_told(hint):
        return Part(
            (f"Tensor {name}",),
            lambda x: iter((x.as_tensor(),)),
            lambda it, read: hint.of_tensor(next(it)) if read else next(it),
        )
    kinds = set(typing.get_args(hint) or (hint,))
    if typing.get_origin(hint) is tuple:
        kind, _ = typing.get_args(hint)
        slots = (f"{_KINDS[kind]}[] {name}",)
        return Part(slots, lambda x: iter((list(x),)), lambda it, _: tuple(next(it)))
    optional = "?" if NoneType in kinds else ""
    kinds -= {NoneType}
    if Tensor in kinds and len(kinds) == 2:
        (number,) = kinds - {Tensor}
        return _either(name, number, optional)
    if len(kinds) != 1 or not kinds <= _KINDS.keys():
        raise TypeError(f"{name} must be a tensor, a number, a string or a record of these, got {hint}")
    (kind,) = kinds
    return Part((f"{_KINDS[kind]}{optional} {name}",), lambda x: iter((x,)), lambda it, _: next(it))


def is_told(hint: Any) -> bool:
    """Whether one tensor tells the object, as it does a layout."""
    return hasattr(hint, "of_tensor")


def holds_tensor(hint: Any) -> bool:
    """Whether it is a tensor, perhaps, or a record in which there is one."""
    if hasattr(hint, "_fields"):
        return any(map(holds_tensor, typing.get_type_hints(hint).values()))
    return hint is Tensor or Tensor in typing.get_args(hint)


def negative(name: str, hint: Any) -> str:
    """Text of Python: whether some tensor of what has the ``name`` is negated where torch reads it."""
    if not holds_tensor(hint):
        return "False"
    if hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint).values()
        parts = [negative(f"{name}[{i}]", x) for i, x in enumerate(hints) if holds_tensor(x)]
        return f"({' or '.join(parts)})"
    is_number = not {NoneType}.issuperset({*typing.get_args(hint)} - {Tensor})
    # in a node of a backward pass None stands for tensors that were not saved
    there = f"isinstance({name}, Tensor)" if is_number else f"{name} is not None"
    return f"({there} and {name}.is_neg())"


def resolved(x: Any) -> Any:
    """A tensor, or the tensors of a record, with their values in memory as they are."""
    if isinstance(x, Tensor):
        return x.resolve_neg() if x.is_neg() else x
    if hasattr(x, "_fields"):
        return type(x)._make(map(resolved, x))
    return tuple(map(resolved, x)) if type(x) is tuple else x


def _record(name: str, record: Any) -> Part:
    hints = typing.get_type_hints(record)
    if name and set(hints.values()) <= {float, int, bool}:
        return _numbers(name, record, list(hints.values()))
    parts = [part_of(f"{name}_{field}" if name else field, hints[field]) for field in record._fields]

    def flat(x: Any) -> Iterator[Any]:
        for part, value in zip(parts, x, strict=True):
            yield from part.flat(value)

    def made(it: Iterator[Any], read: bool) -> Any:
        return record(*[part.made(it, read) for part in parts])

    return Part(tuple(slot for part in parts for slot in part.slots), flat, made)


def _numbers(name: str, record: Any, kinds: list[type]) -> Part:
    """A record of nothing but numbers: two lists, for a schema has room for 64 arguments."""
    whole = [i for i, kind in enumerate(kinds) if kind is not float]
    broken = [i for i, kind in enumerate(kinds) if kind is float]

    def flat(x: Any) -> Iterator[Any]:
        return iter(([int(x[i]) for i in whole], [float(x[i]) for i in broken]))

    def made(it: Iterator[Any], read: bool) -> Any:
        values = dict(zip(whole, next(it), strict=True)) | dict(zip(broken, next(it), strict=True))
        return record(*[kind(values[i]) for i, kind in enumerate(kinds)])

    return Part((f"int[] {name}_integers", f"float[] {name}_numbers"), flat, made)


def _either(name: str, number: type, optional: str) -> Part:
    absent = None if optional else number(1)

    def flat(x: Any) -> Iterator[Any]:
        return iter((x, absent) if isinstance(x, Tensor) else (None, x))

    def made(it: Iterator[Any], read: bool) -> Any:
        tensor, value = next(it), next(it)
        return value if tensor is None else tensor

    return Part((f"Tensor? {name}", f"{_KINDS[number]}{optional} {name}_number"), flat, made)
