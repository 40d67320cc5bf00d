"""What ``patch`` returns."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import Self

import rlkernel
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._environment import restore
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import switch


class VllmPatch(CountedPatch):
    """What ``patch`` returns: undo it, or read what it replaced and which calls went where.

    Its counts are those of this process.  ``stats(llm)`` asks the worker processes of an engine for theirs.
    """

    def __init__(
        self, ops: tuple[str, ...], strict: bool, return_support: int = 0, batch_invariant: bool = False
    ) -> None:
        super().__init__("rlkernel.patch_vllm", "vLLM")
        self.ops = ops
        self.strict = strict
        self.return_support = return_support
        """Room for the kept tokens of requests that do not say how much they want."""
        self.batch_invariant = batch_invariant
        """Whether a request has the bits that transformers has under ``rlkernel.batch_invariant``."""
        self._mode = contextlib.ExitStack()
        self.bytes: Counter[str] = Counter()
        """What the attention of served steps has read of the cache, and what it would have read."""
        self.refused: dict[str, str] = {}
        """Which op is not replaced after all, and why."""
        self.environment: dict[str, str | None] = {}
        """What the environment held before; nothing where this process found the switch set."""

    @contextmanager
    def planning(self, op: str) -> Iterator[None]:
        """What is planned inside belongs to ``op``: all of it, or none where it is refused."""
        planned = len(self._plan), len(self._everywhere)
        try:
            yield
        except (PatchError, ImportError, AttributeError) as error:
            if self.strict:
                raise PatchError(f"{op} cannot be replaced: {error}") from error
            del self._plan[planned[0] :], self._everywhere[planned[1] :]
            self.refused[op] = str(error)
            self.logger.warning("%s() leaves %s to vLLM: %s", self.name, op, error)

    def counts(self) -> dict[str, Any]:
        """The counts of this process."""
        return {
            "pid": os.getpid(),
            "calls": dict(self.calls),
            "fallbacks": dict(self.fallbacks),
            "bytes": dict(self.bytes),
            "refused": dict(self.refused),
        }

    def stats(self, llm: Any = None) -> list[dict[str, Any]]:
        """The counts of this process, or of each worker of the engine ``llm`` (``vllm.LLM``)."""
        return [self.counts()] if llm is None else llm.collective_rpc("rlkernel_stats")

    def apply(self) -> Self:
        super().apply()
        switch.make_known()
        if self.batch_invariant and "batch_invariant" not in self.refused:
            self._mode.enter_context(rlkernel.batch_invariant(strict=False))
        return self

    def undo(self) -> None:
        """Restore this process and its environment; a process that runs already stays as it is."""
        was_active = self.active
        super().undo()
        if was_active:
            self._mode.close()
            switch.forget()
            restore(self.environment)
            self.environment = {}
