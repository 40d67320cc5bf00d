"""The lm_head of SkyRL's models: logprobs and entropies of hidden states, without logits.

SkyRL's forward runs as it is, with its packing, sequence parallelism and images.  Only the lm_head, inside
its model's call, where FSDP has gathered its weight, makes something else: the logprobs of the tokens that
follow, of the positions that SkyRL reads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import Arguments, misplaced, shown, unfit_temperature
from rlkernel.integrations.hf.lm_head import COMPILED, IGNORED, HeadError, narrow_head
from rlkernel.integrations.hf.models import is_compiled
from rlkernel.integrations.skyrl import contract, scoring
from rlkernel.integrations.skyrl.logprobs import LOGPROBS
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch

MODEL = "HFModelWrapper"
SLICE = "ulysses_pad_and_slice_inputs"


def plan(patch: SkyrlPatch) -> None:
    """Add what is replaced to a patch."""
    home = importlib.import_module(contract.HOMES["fused_head"])
    kind = vars(home).get(MODEL)
    if not isinstance(kind, type):
        raise PatchError(f"{home.__name__}.{MODEL} must be a class, got {kind!r}")
    forward = contract.checked(kind, "forward")
    for name in (LOGPROBS, SLICE):
        if not callable(vars(home).get(name)):
            raise PatchError(f"{home.__name__}.{name} must be callable, got {vars(home).get(name)!r}")
    patch.replace(kind, "forward", _forward(forward, patch, home), expected=forward)
    if not patch.plans(LOGPROBS):  # else it asks for what a call has found
        original = vars(home)[LOGPROBS]
        patch.replace(home, LOGPROBS, _asking(original), expected=original)


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Any:
        if (found := scoring.current()) is not None:
            return found.logprobs(logits, labels)
        return original(logits, labels, inplace_backward)

    return shown(logprobs_from_logits, original, "linear_logprob")


def _forward(original: Callable[..., Any], patch: SkyrlPatch, home: ModuleType) -> Callable[..., Any]:
    signature = inspect.signature(original)
    unfit: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reason = _unable(given) or unfit.get(self.model)
        if reason is None:
            try:
                head = narrow_head(self.model, given["temperature"], given["compute_entropy"])
            except ValueError as error:
                reason = str(error)
        if reason is not None:
            patch.left(MODEL, reason)
            return original(self, *args, **kwargs)
        asked = scoring.Scoring(head, _labels(given, home), given["entropy_requires_grad"])
        try:
            with asked.of(self):
                found = original(**given | {"temperature": 1.0})  # the logprobs have it
        except HeadError as error:  # what only a call shows
            unfit[self.model] = str(error)
            patch.left(MODEL, str(error))
            return original(self, *args, **kwargs)
        patch.count(patch.calls, MODEL)
        return found

    return shown(forward, original, "linear_logprob")


def _unable(given: Arguments) -> str | None:
    sequences, mask, actions = (given[name] for name in ("sequences", "attention_mask", "num_actions"))
    if reason := misplaced(sequences=sequences, attention_mask=mask):
        return reason
    if sequences.dim() != 2 or mask.shape != sequences.shape:
        return "sequences and attention_mask are not [B, L]"
    if isinstance(actions, list) and len(actions) == 1:
        actions = actions[0]
    if isinstance(actions, bool) or not isinstance(actions, int):
        return "num_actions is no number"
    if reason := unfit_temperature(given["temperature"]):
        return reason
    return COMPILED if is_compiled(given["self"].model) else None


def _labels(given: Arguments, home: ModuleType) -> Tensor:
    """Of each position of the model's input, the token that follows, where SkyRL reads its logprob and both
    are there."""
    wrapper, sequences, there = given["self"], given["sequences"], given["attention_mask"].bool()
    actions = given["num_actions"]
    actions = actions[0] if isinstance(actions, list) else actions
    read = torch.zeros_like(there)
    read[:, -actions - 1 : -1] = True
    labels = sequences.roll(-1, 1).where(read & there & there.roll(-1, 1), IGNORED)
    if wrapper.remove_microbatch_padding:
        labels = labels[there][None]
    if wrapper.sequence_parallel_size > 1:
        labels = vars(home)[SLICE](labels, None, None, wrapper.sequence_parallel_size)[0]
    return labels
