"""How much Python runs: what a busy machine does not change."""

import sys
from collections.abc import Callable
from typing import Any


def events(work: Callable[[], Any]) -> int:
    """The lines, calls and returns that ``work()`` executes."""
    count = 0

    def counting(*_: Any) -> None:
        nonlocal count
        count += 1

    sys.settrace(lambda *_: counting)
    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return count
