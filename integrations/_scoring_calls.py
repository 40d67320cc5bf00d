"""Models that score tokens while a trainer calls them that expects logits: TRL's before 1.15, and others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlkernel.integrations._scored_logits import (
    ENTROPY,
    IS_TOP1,
    LABEL,
    LARGEST,
    LOGPROB,
    MEAN_LOGIT,
    ScoredLogits,
    Scores,
)
from rlkernel.integrations.deepspeed.engine_head import EngineHead
from rlkernel.integrations.hf.lm_head import (
    COMPILED,
    IGNORED,
    HeadError,
    LmHead,
    as_rows,
    narrow_head,
    that_runs,
)
from rlkernel.integrations.hf.models import causal_lm, is_compiled
from rlkernel.types import Statistic

STATISTICS: tuple[Statistic, ...] = ("mean_logits", "is_top1")
COLUMN: dict[Statistic, int] = {"mean_logits": MEAN_LOGIT, "is_top1": IS_TOP1}

# of the tokens and the keywords of a call: the label of each row of the lm_head
Labels = Callable[[Any, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Asked:
    """What a trainer goes on to compute of logits, and of which rows."""

    temperature: float = 1.0
    entropy: bool = False
    of_loss: bool = False  # whether a loss has the entropy, and it a gradient
    statistics: tuple[Statistic, ...] = ()
    padding: bool = False  # whether a loss has the tokens behind a completion, too
    last: int | None = None  # so many tokens at the end of each sample are scored, if the model lets them
    masks: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # tokens, and which of them are scored
    reference: Any = None  # a model of which nothing is asked but log-probabilities
    of_all: bool = False  # or there is none: each model's call is asked for the same
    labels: Labels | None = None  # or they are the next tokens
    framework: str = "TRL"
    head: type[LmHead] = EngineHead
    kind: type[ScoredLogits] = ScoredLogits
    masked: tuple[int, ...] = ()  # see ``Scores``


@dataclass
class Calls:
    """What became of the models' calls."""

    made: int = 0
    unable: list[str] = field(default_factory=list)
    under_way: bool = False  # a wrapper's call is one of the model in it, too
    failed: nn.Module | None = None  # the lm_head in whose model's call something went wrong


@contextlib.contextmanager
def scored_calls(
    models: Iterable[Any], asked: Asked, strange: WeakKeyDictionary[nn.Module, str]
) -> Iterator[Calls]:
    """Inside, each call of a model has scored logits for logits, where its lm_head can score."""
    calls = Calls()
    with contextlib.ExitStack() as hooks:
        seen: list[Any] = []
        for model in models:
            if model is None or any(known is model for known in seen):
                continue
            seen.append(model)
            try:
                hooks.enter_context(_Scoring(model, asked, calls, strange).hooked())
            except ValueError as error:
                if str(error) not in calls.unable:
                    calls.unable.append(str(error))
                if len(seen) == 1:  # rounding would tell a reference scored here from a policy that is not
                    break
        try:
            yield calls
        except HeadError as error:
            if calls.failed is not None:
                strange[calls.failed] = str(error)
            raise


class _Scoring:
    """One model: what its call is told of labels, and what it returns."""

    def __init__(
        self, model: Any, asked: Asked, calls: Calls, strange: WeakKeyDictionary[nn.Module, str]
    ) -> None:
        if is_compiled(model):
            raise ValueError(COMPILED)
        self.model, self.asked, self.calls, self.strange = model, asked, calls, strange
        self.head = self.find_head()
        self.embeddings = causal_lm(model).get_output_embeddings()
        self.entered = contextlib.ExitStack()
        self.labels: Tensor | None = None
        self.thread = threading.get_ident()  # others may generate meanwhile, as axolotl's

    def find_head(self) -> LmHead:
        head = narrow_head(self.model, self.asked.temperature, self.asked.entropy, self.asked.head)
        if reason := self.strange.get(head.module):
            raise ValueError(reason)
        if head.shard and self.asked.statistics:
            raise ValueError(f"{head.name}: its lm_head is shared out over ranks")
        if head.module.weight.shape[0] > LARGEST:
            raise ValueError(f"the vocabulary has more than {LARGEST} tokens")
        return head

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        # of the module that the trainer calls: what wrappers do to outputs is behind them
        before = self.model.register_forward_pre_hook(self.begin, with_kwargs=True)
        after = self.model.register_forward_hook(self.end, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self.entered.close()

    def begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.calls.under_way or threading.get_ident() != self.thread:
            return
        ids = args[0] if args else kwargs.get("input_ids")
        known = self.asked.labels is not None or (isinstance(ids, Tensor) and ids.dim() == 2)
        if not known or kwargs.get("labels") is not None:
            who = f"{self.head.name}: {self.asked.framework}"
            raise HeadError(f"{who} must call it with input_ids, [B, T], and without labels")
        if that_runs(self.embeddings) is not self.head.module:
            # of an adapter with an lm_head of its own, which a loss of preferences turns off for a while
            try:
                self.head = self.find_head()
            except ValueError as error:
                raise HeadError(str(error)) from error
        self.labels = (self.asked.labels or self.asked_labels)(ids, kwargs)
        bare = self.is_bare()
        self.head.return_entropy = self.asked.entropy and not bare
        self.head.statistics = () if bare else self.asked.statistics
        shape = self.labels.shape[0], self.labels.shape[1]
        self.entered.enter_context(self.head.scoring(shape, as_rows, self.labels.reshape(-1)))
        self.calls.under_way = True

    def asked_labels(self, ids: Any, kwargs: dict[str, Any]) -> Tensor:
        """The next token of each row of the lm_head; none where the trainer has no use for it."""
        keep = kwargs.get("logits_to_keep") or ids.shape[1]
        mask = next((mask for tokens, mask in self.asked.masks if tokens is ids), None)
        if mask is None:
            mask = kwargs.get("attention_mask")
        labels = ids.roll(-1, 1).to(torch.int64)
        labels[:, -1:] = IGNORED
        if isinstance(mask, Tensor) and mask.shape == ids.shape and not self.asked.padding:
            labels[:, :-1].masked_fill_(mask[:, 1:] == 0, IGNORED)
        if self.asked.last is not None:
            labels[:, : -self.asked.last - 1] = IGNORED
        return labels[:, -keep:]

    def is_bare(self) -> bool:
        """Whether this is the reference, of which nothing is asked but log-probabilities."""
        if self.asked.of_all:
            return False
        if self.model is self.asked.reference:
            return True
        return bool(self.asked.statistics) and self.model.training and not torch.is_grad_enabled()

    def end(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        if self.labels is None or threading.get_ident() != self.thread:
            return None
        labels, self.labels = self.labels, None
        self.entered.close()
        self.calls.under_way, self.calls.failed = False, self.head.module
        if output is None:  # an exception is on its way
            return None
        logprobs, entropy = self.head.results(output)
        self.calls.failed = None
        output.logits = self.scored(labels, logprobs, entropy)
        self.calls.made += 1
        return output

    def scored(self, labels: Tensor, logprobs: Tensor, entropy: Tensor | None) -> ScoredLogits:
        nothing = torch.zeros_like(logprobs, requires_grad=False)
        columns, values = [LOGPROB, LABEL], [logprobs, nothing, nothing, nothing]
        if entropy is not None:
            columns.append(ENTROPY)
            values[ENTROPY] = entropy if self.asked.of_loss else entropy.detach()
        for name in self.head.statistics:
            columns.append(COLUMN[name])
            values[COLUMN[name]] = self.head.found[name]
        table = torch.stack(
            [*(x.to(logprobs.dtype) for x in values), labels.reshape(-1).to(logprobs.dtype)], -1
        )
        asked = self.asked
        scores = Scores(self.head, asked.temperature, tuple(columns), asked.framework, asked.masked)
        return asked.kind.of(table.view(*labels.shape, -1), scores)
