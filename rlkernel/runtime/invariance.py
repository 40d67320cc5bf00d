"""Whether ``rlkernel.batch_invariant`` is on, for the process, and what is counted while it is."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple


class Places(NamedTuple):
    """Where attention has seen rows stand: the windows of whole sequences, and the keys that single rows
    behind a cache saw."""

    windows: set[int]
    steps: set[int]


class Setting:
    """Of one block, or of ``enable``."""

    def __init__(self, level: str, strict: bool, vendor: bool = False) -> None:
        self.level, self.strict, self.vendor = level, strict, vendor
        self.calls: Counter[tuple[str, str]] = Counter()
        # strict calls apart: those of a policy are, those of a model that rewards it beside it need not be
        self.places = {strict: Places(set(), set()) for strict in (True, False)}


settings: list[Setting] = []  # the last one counts
lock = threading.RLock()
asides: list[None] = []  # one for each block of ``aside`` in any thread: C++ takes no call meanwhile
used = threading.local()  # the backend of the call that is under way
_thread = threading.local()


def _after_fork() -> None:
    """The child of a fork has not the other threads, whose lock and asides would stay for ever."""
    global lock
    lock = threading.RLock()
    asides[:] = [None] if is_aside() else []


os.register_at_fork(after_in_child=_after_fork)


def is_on() -> bool:
    return bool(settings)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """In this thread torch's operations are its own meanwhile: for figures that no model is made of."""
    before = is_aside()
    _thread.aside = True
    asides.append(None)
    try:
        yield
    finally:
        asides.pop()
        _thread.aside = before


def own_figures() -> contextlib.AbstractContextManager[None]:
    """``aside`` for the fp64 of an op itself; nothing that a compiler would see where the mode is off."""
    return aside() if is_on() else contextlib.nullcontext()


def is_aside() -> bool:
    return getattr(_thread, "aside", False)


def is_strict() -> bool:
    """A block that another thread has just left cannot let a call through."""
    found = settings[-1:]
    return not found or found[0].strict


def takes_vendors() -> bool:
    """Whether a product of torch's that was compared with ours may take its place."""
    found = settings[-1:]
    return bool(found) and found[0].vendor


def count(op: str, backend: str) -> None:
    for setting in settings:
        setting.calls[op, backend] += 1
