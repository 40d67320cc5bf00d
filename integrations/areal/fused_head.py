"""The lm_head of AReaL's FSDP engine: logprobs and entropies of hidden states, without logits.

The engine runs as it is, with its packing, padding and sequence parallelism.  Only the lm_head, inside its
model's call, where FSDP has gathered its weight, makes something else: of each token the logprob of the next
one, and for a loss the entropy and the extremes of the logits that AReaL logs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import shown, unfit_temperature
from rlkernel.integrations.areal import contract, scoring
from rlkernel.integrations.areal.areal_patch import ArealPatch
from rlkernel.integrations.areal.logprobs import ENTROPY, LOGPROBS
from rlkernel.integrations.areal.ranks_head import RanksHead
from rlkernel.integrations.hf.lm_head import COMPILED, HeadError, LmHead, narrow_head
from rlkernel.integrations.hf.models import is_compiled

ENGINE = "FSDPEngine"
PASSES = "forward_backward_batch"
CALLS = {"train_batch": True, "eval_batch": True, "forward_batch": False}  # and whether a loss follows
LOGITS_ASKED = "the logits are asked for"
# what the logits that are none go through
READERS = ("_compute_logprobs", "_compute_logprobs_entropy")
LOSS = "_compute_logprobs_and_loss", "_compute_forward_result"

_of_loss: ContextVar[bool | None] = ContextVar("of_loss", default=None)


def plan(patch: ArealPatch) -> None:
    """Add what is replaced to a patch."""
    home = importlib.import_module(contract.HOMES["fused_head"])
    kind = vars(home).get(ENGINE)
    if not isinstance(kind, type):
        raise PatchError(f"{home.__name__}.{ENGINE} must be a class, got {kind!r}")
    for name in READERS:
        contract.checked(kind, name)
    for name, of_loss in CALLS.items():
        _replace(patch, kind, name, functools.partial(_called, of_loss))
    _replace(patch, kind, PASSES, functools.partial(_passes, patch, kind))
    _replace(patch, kind, "_prepare_mb_inputs", _prepared)
    _replace(patch, kind, "_get_vocab_min_max_logits", _extremes)
    for name in (LOGPROBS, ENTROPY):
        if not patch.plans(name):  # else it asks for what a call has found
            _ask(patch, home, name)


Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def _replace(patch: ArealPatch, kind: type, name: str, make: Make) -> None:
    original = contract.checked(kind, name)
    new = functools.wraps(original)(make(original))
    patch.replace(kind, name, shown(new, original, "linear_logprob"), expected=original)


def _ask(patch: ArealPatch, home: ModuleType, name: str) -> None:
    original = vars(home).get(name)
    if not callable(original):
        raise PatchError(f"{home.__name__}.{name} must be callable, got {original!r}")
    patch.replace(home, name, scoring.asking(original), expected=original)


def _called(of_loss: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _asked(of_loss):
            return original(self, *args, **kwargs)

    return call


@contextmanager
def _asked(of_loss: bool | None) -> Iterator[None]:
    token = _of_loss.set(of_loss)
    try:
        yield
    finally:
        _of_loss.reset(token)


def _passes(patch: ArealPatch, kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
    unfit: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def left(self: Any, reason: str, *args: Any) -> Any:
        patch.left(ENGINE, reason, quiet=reason == LOGITS_ASKED)
        with _asked(None), scoring.passing(None):
            return original(self, *args)

    def forward_backward_batch(
        self: Any, mb_list: Any, process_output_fn: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        of_loss = _of_loss.get()
        reason = _unable(self, kind, of_loss) or unfit.get(self.model)
        if reason is None:
            try:
                kind_of_head = RanksHead if self.parallel_helper.tp_size > 1 else LmHead
                head = narrow_head(self.model, self.config.temperature, False, kind_of_head)
            except ValueError as error:
                reason = str(error)
        if reason is not None:
            return left(self, reason, mb_list, process_output_fn, forward_only)
        found = scoring.Scoring(self, head, bool(of_loss))

        def processed(logits: Tensor, context: dict[str, Any]) -> Any:
            found.end(logits)
            result = process_output_fn(logits, context)
            found.batches += 1
            return result

        try:
            with _asked(None), scoring.passing(found):
                result = original(self, mb_list, processed, forward_only)
        except HeadError as error:  # what only a call shows
            unfit[self.model] = str(error)
            if found.batches:  # some have had their backward pass
                raise
            return left(self, str(error), mb_list, process_output_fn, forward_only)
        patch.count(patch.calls, ENGINE)
        return result

    return forward_backward_batch


def _prepared(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_mb_inputs(self: Any, mb_item: Any) -> Any:
        inputs, context = original(self, mb_item)
        if (found := scoring.preparing(self)) is not None:
            found.begin(inputs, context.pad_length)
        return inputs, context

    return _prepare_mb_inputs


def _extremes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_vocab_min_max_logits(self: Any, logits: Tensor, ulysses_pad_size: int = 0) -> Any:
        if (found := scoring.current(logits)) is not None:
            logits = found.extremes()
        return original(self, logits, ulysses_pad_size)

    return _get_vocab_min_max_logits


def _unable(engine: Any, kind: type, of_loss: bool | None) -> str | None:
    ranks = engine.parallel_helper
    if of_loss is None:
        return LOGITS_ASKED
    if engine.config.is_critic:
        return "a critic has no vocabulary"
    if engine.enable_tree_training:
        return "the batch is a tree of tokens"
    if engine.is_vision_model and ranks.sp_size > 1:
        return "a vision model's tokens are shared out inside of it"
    own = next((name for name in (*READERS, *LOSS) if _differs(engine, kind, name)), None)
    if own is not None:
        return f"the engine has a {own} of its own"
    if is_compiled(engine.model):
        return COMPILED
    return unfit_temperature(engine.config.temperature)


def _differs(engine: Any, kind: type, name: str) -> bool:
    return getattr(type(engine), name, None) is not vars(kind).get(name) or name in vars(engine)
