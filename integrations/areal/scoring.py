"""Micro-batches of AReaL's FSDP engine whose lm_head scores labels, and who asks for what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import shown
from rlkernel.integrations.hf.lm_head import IGNORED, LmHead, as_rows
from rlkernel.types import Statistic

EXTREMES: tuple[Statistic, ...] = ("min_logits", "max_logits")


class Scoring:
    """What takes the place of the logits of a model, one micro-batch after another.

    The engine hands what it has for logits to those whom it asks of them; so what is found is theirs alone
    who come with the very tensor, and a loss may gather from logits of its own.
    """

    def __init__(self, engine: Any, head: LmHead, of_loss: bool) -> None:
        self.engine, self.head = engine, head
        self.batches = 0  # that are done with
        if of_loss:
            head.return_entropy, head.statistics = True, EXTREMES
        self._inside = contextlib.ExitStack()
        self._labels = torch.empty(0, dtype=torch.float32, device="cpu")
        self._logits: Tensor | None = None
        self._found: tuple[Tensor, Tensor | None] | None = None

    def begin(self, inputs: dict[str, Any], padding: int) -> None:
        """The model is about to be called with ``inputs``: from now on its lm_head scores the tokens that
        follow, of which Ulysses' ranks have their parts; not in the padding behind, which AReaL cuts off."""
        tokens = inputs["input_ids"]
        rolled = inputs.get("rolled_input_ids")
        self._labels = (tokens.roll(-1, -1) if rolled is None else rolled).reshape(-1)
        if rolled is None and padding:
            self._labels[-padding:] = IGNORED
        self._logits = self._found = None
        self._inside.enter_context(self.head.scoring((1, self._labels.numel()), as_rows, self._labels))

    def end(self, logits: Tensor) -> None:
        """The model has returned ``logits``, which are none."""
        self._inside.close()
        self._found = self.head.results(SimpleNamespace(logits=logits[None]))
        self._logits = logits

    def close(self) -> None:
        self._inside.close()
        self._logits = self._found = None

    def answers(self, logits: Any) -> bool:
        return self._logits is not None and logits is self._logits

    def gathered(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """In place of the gathered log-probabilities and entropies."""
        self.head.check_labels(self._labels, labels.reshape(-1), "AReaL")
        assert self._found is not None
        return self._found

    def extremes(self) -> Tensor:
        """[N, 2]: what is the smallest and the largest of each row of logits."""
        ends = torch.stack([self.head.found[name] for name in EXTREMES], -1)
        return ends * self.head.temperature


def current(logits: Any) -> Scoring | None:
    """Whose ``logits`` these are."""
    found = _current.get()
    return found if found is not None and found.answers(logits) else None


def preparing(engine: Any) -> Scoring | None:
    """Whose micro-batches ``engine`` prepares."""
    found = _current.get()
    return found if found is not None and found.engine is engine else None


@contextlib.contextmanager
def passing(found: Scoring | None) -> Iterator[None]:
    """For the time of an engine's passes, which another's may be inside of; None: the engine makes logits."""
    token = _current.set(found)
    try:
        yield
    finally:
        _current.reset(token)
        if found is not None:
            found.close()


def asking(gather: Callable[..., Any]) -> Callable[..., Any]:
    """``gather_logprobs`` or ``gather_logprobs_entropy``, or what was scored where there are no logits."""
    both = gather.__name__.endswith("_entropy")

    def asked(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (found := current(logits)) is None:
            return gather(logits, labels, *args, **kwargs)
        logprobs, entropy = found.gathered(labels)
        return (logprobs, entropy) if both else logprobs

    return shown(asked, gather, gather.__qualname__)


_current: ContextVar[Scoring | None] = ContextVar("scoring", default=None)
