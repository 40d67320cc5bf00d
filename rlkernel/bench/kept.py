"""A report that is on disk after every case: a run that ends early keeps it, ``--resume`` goes on with it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlkernel.bench import report
from rlkernel.bench.cases import Case, UsageError
from rlkernel.bench.run import Row

SAME = ("device", "threads", "machine", "versions", "commit", "settings")  # of a header, or rows do not mix


def usual_path(root: Path) -> Path:
    """Where a run that names no file keeps its report: build/ of the sources, or the user's cache."""
    if (root / "Makefile").is_file():
        return root / "build" / "bench.json"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rlkernel" / "bench.json"


def keys(cases: Iterable[Case]) -> list[str]:
    """A name for each case: its own, and a number where another of the run has the same."""
    found: list[str] = []
    seen: dict[str, int] = {}
    for case in cases:
        name = f"{case.op} {case.name} {case.dtype}"
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


class Kept:
    """The rows of a run by case, and how many seconds each case took; ``path`` None keeps no file.

    Raises:
        UsageError: what is to be resumed is a report of other options, versions or of another machine; or the
            file that was asked for cannot be written.
    """

    def __init__(self, path: Path | None, head: dict[str, Any], asked: bool, resume: bool) -> None:
        self.path, self.head, self.asked = path, {**head, "took": {}, "noise": []}, asked
        self.rows: list[Row] = []
        if resume and path is not None and path.exists():
            self._resume(report.load(path))
        if path is not None:
            self._save()  # before anything is measured: a place that cannot be written is said now

    def __contains__(self, key: str) -> bool:
        return key in self.head["took"]

    @property
    def took(self) -> dict[str, float]:
        return self.head["took"]

    def add(self, key: str, rows: list[Row], seconds: float) -> None:
        self.rows += rows
        self.took[key] = round(seconds, 2)
        self._save()

    def noise(self, when: str, reading: dict[str, Any]) -> None:
        """What the doctor saw ``before`` or ``after`` the measurements."""
        self.head["noise"].append({"when": when, **reading})
        self._save()

    def _resume(self, stored: dict[str, Any]) -> None:
        before = stored["header"]
        for name in SAME:
            if before.get(name) != self.head[name]:
                had, got = _differing(before.get(name), self.head[name])
                raise UsageError(
                    f"--resume must go on with a report of the same {name} ({had}), "
                    f"got {got}: leave --resume out, or name another --json"
                )
        self.rows = stored["rows"]
        self.head |= {name: before[name] for name in ("took", "noise")}

    def _save(self) -> None:
        if self.path is None:
            return
        try:
            if not self.asked:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            report.save(str(self.path), self.head, self.rows)
        except OSError as error:
            if self.asked:
                raise UsageError(f"--json must be a file that can be written, got {error}") from error
            self.path = None  # the run is worth more than a copy that nobody asked for


def _differing(before: Any, now: Any) -> tuple[Any, Any]:
    """Of two mappings only what is not the same, as a reader would look for."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before, now
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: before.get(name) for name in names}, {name: now.get(name) for name in names}
