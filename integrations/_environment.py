"""What the switches of frameworks have in common: variables that a framework hands to its processes."""

import os
from collections.abc import Iterable


def chosen(names: Iterable[str], there: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """Those of ``there`` that are named, each once, in the order of ``there``.

    Raises:
        ValueError: a name is not there, or none is given.
    """
    names = tuple(names)
    if not names or not all(name in there for name in names):
        raise ValueError(f"{argument} must name some of {there}, got {names}")
    return tuple(name for name in there if name in names)


def restore(before: dict[str, str | None]) -> None:
    """Set the variables to what they were; None: they were not there."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
