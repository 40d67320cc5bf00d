"""Says what is being measured: a bar where rich and a terminal are there, plain lines otherwise."""

import sys
from types import TracebackType
from typing import TextIO


class Progress:
    """``with Progress(total) as progress: progress.step("what runs now")``; writes to stderr."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done, self.stream = total, 0, stream or sys.stderr
        self._bar = _rich_bar(total) if self.stream.isatty() else None

    def step(self, text: str) -> None:
        """One more of ``total`` steps begins."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(0, completed=self.done - 1, description=text)
        else:
            print(f"[{self.done:>{len(str(self.total))}}/{self.total}] {text}", file=self.stream, flush=True)

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


def _rich_bar(total: int):  # type: ignore[no-untyped-def]
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:  # the extra `bench` is not installed
        return None
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("", total=total)
    return bar
