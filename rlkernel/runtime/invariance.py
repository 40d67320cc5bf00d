"""Whether ``rlkernel.batch_invariant`` is on, for the process, and what is counted while it is."""

from __future__ import annotations

import threading
from collections import Counter


class Setting:
    """Of one block, or of ``enable``."""

    def __init__(self, level: str, strict: bool) -> None:
        self.level, self.strict = level, strict
        self.calls: Counter[tuple[str, str]] = Counter()


settings: list[Setting] = []  # the last one counts
lock = threading.RLock()


def is_on() -> bool:
    return bool(settings)


def count(op: str, backend: str) -> None:
    for setting in settings:
        setting.calls[op, backend] += 1
