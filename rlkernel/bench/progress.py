"""Says what is being measured and how long it will take yet: a bar with rich on a terminal, else lines."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO


class Progress:
    """``with Progress(total) as progress: progress.step("what runs now")``; writes to stderr.

    ``remaining`` tells how many seconds are left at the beginning of what runs now.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        remaining: Callable[[], float] | None = None,
    ) -> None:
        self.total, self.done, self.stream = total, 0, stream or sys.stderr
        self.began, self._remaining = time.monotonic(), remaining
        self._bar = _rich_bar(total, remaining is not None) if self.stream.isatty() else None

    def step(self, text: str) -> None:
        """One more of ``total`` steps begins."""
        self.done += 1
        left = "" if self._remaining is None else _clock(self._remaining())
        if self._bar is not None:
            self._bar.update(0, completed=self.done - 1, description=text, left=left)
            return
        clock = f"  ({_clock(time.monotonic() - self.began)}, about {left} left)" if left else ""
        print(
            f"[{self.done:>{len(str(self.total))}}/{self.total}] {text}{clock}", file=self.stream, flush=True
        )

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.update(0, completed=self.done)
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _rich_bar(total: int, estimated: bool):  # type: ignore[no-untyped-def]
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:  # the extra `bench` is not installed
        return None
    columns = [BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn()]
    columns += [TextColumn("about {task.fields[left]} left")] if estimated else []
    bar = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
    bar.add_task("", total=total, left="")
    return bar
