"""A call of one of SkyRL's models whose lm_head scores labels, and who asks for what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rlkernel.integrations.hf.lm_head import LmHead, as_rows


class Scoring:
    """What takes the place of the logits, of which SkyRL's forward asks two functions."""

    def __init__(self, head: LmHead, labels: Tensor, entropy_requires_grad: bool) -> None:
        self.head = head
        self.labels = labels
        self.entropy_requires_grad = entropy_requires_grad
        self._entropy: Tensor | None = None

    @contextlib.contextmanager
    def of(self, wrapper: Any) -> Iterator[None]:
        """Inside, the lm_head of the model scores, and this is asked for what it found."""
        before = wrapper.chunked_entropy_from_logits_fn  # SkyRL's own, or what torch.compile made of it
        wrapper.chunked_entropy_from_logits_fn = self.entropy
        token = _current.set(self)
        try:
            with self.head.scoring(
                (self.labels.shape[0], self.labels.shape[1]), as_rows, self.labels.flatten()
            ):
                yield
        finally:
            _current.reset(token)
            wrapper.chunked_entropy_from_logits_fn = before

    def logprobs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """In place of ``logprobs_from_logits``, of what the model made of the lm_head's answer."""
        self.head.check_labels(self.labels, labels, "SkyRL")
        found, entropy = self.head.results(SimpleNamespace(logits=logits))
        self._entropy = None if entropy is None else entropy.view(self.labels.shape)
        return found.view(self.labels.shape)

    def entropy(
        self,
        logits: Tensor,
        requires_grad: bool = False,
        attention_mask: Tensor | None = None,
        chunk_size: int = 1024,
    ) -> Tensor:
        """In place of ``chunked_entropy_from_logits``; what the mask leaves out has not been scored."""
        assert self._entropy is not None
        return self._entropy if requires_grad else self._entropy.detach()


def current() -> Scoring | None:
    return _current.get()


_current: ContextVar[Scoring | None] = ContextVar("scoring", default=None)
