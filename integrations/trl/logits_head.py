"""TRL before 1.15, whose trainers make logits: their models score tokens instead.

GRPO and RLOO score the tokens of groups in one method, DPO and KTO those of preferences in their losses.
While one of these runs, the lm_head of each model that it calls makes log-probabilities where it would have
made logits, and what TRL goes on to compute of logits is looked up (``scored_logits``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from rlkernel.integrations import _contract
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._replacing import shown, unfit_temperature
from rlkernel.integrations.hf.lm_head import HeadError
from rlkernel.integrations.trl import contract
from rlkernel.integrations.trl.head import Head
from rlkernel.integrations.trl.helpers import HELPERS, helper
from rlkernel.integrations.trl.scored_logits import ScoredLogits
from rlkernel.integrations.trl.scoring_calls import STATISTICS, Asked, scored_calls
from rlkernel.integrations.trl.trl_patch import TrlPatch

ASKED_FOR = "the logits are asked for"

# heads of models that do something to logits that their config does not tell
_strange: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_looking: WeakSet[Callable[..., Any]] = WeakSet()  # the helpers that know scored logits


def plan(patch: TrlPatch, utils: ModuleType) -> None:
    """Add what is replaced to a patch."""
    if vars(utils).get(contract.HEAD) is not None:
        head = contract.checked_earlier(utils, contract.HEAD)
        patch.replace_everywhere("trl", contract.HEAD, EarlierHead(head, patch, utils), expected=head)
    for ours in HELPERS:
        name = ours.__name__
        for original in _originals(utils, name):
            patch.replace_everywhere(
                "trl", name, _looked_up(name, helper(ours, original, patch)), expected=original
            )
    for trainer in contract.preference_trainers():
        for name, make in ((contract.LOSS, _scored_loss), (contract.REFERENCE, _scored_reference)):
            original = contract.checked_earlier(trainer, name)
            new = shown(make(original, patch), original, "linear_logprob")
            patch.replace(trainer, name, new, expected=original)


def _originals(utils: ModuleType, name: str) -> list[Callable[..., Any]]:
    """What TRL's modules hold by the name of a helper: one function, unless somebody has replaced it in some
    of them, as axolotl does in ``utils`` after the trainers have taken it from there."""
    trainers = (*contract.trainers(), *contract.preference_trainers())
    holders = [utils, *(sys.modules[trainer.__module__] for trainer in trainers)]
    found: list[Callable[..., Any]] = []
    for holder in holders:
        if name in vars(holder) and vars(holder)[name] not in found:
            found.append(contract.checked_earlier(holder, name))
    return found


class EarlierHead(Head):
    """TRL's fused head, which serves its asynchronous trainer and ``use_liger_kernel`` of TRL 1.14.  It takes
    less than today's does, and gives log-probabilities and entropies."""

    def __init__(self, original: Any, patch: TrlPatch, utils: ModuleType) -> None:
        super().__init__(original, patch, utils)
        self.parameters = [p.split("=")[0] for p in _contract.taken(original)]

    def apply(self, *args: Any) -> tuple[Tensor | None, ...]:
        given = dict(zip(self.parameters, args, strict=False))
        head = {
            "bias": given.get("bias"), "temperature": given["temperature"], "return_entropy": True,
            "softcap": given.get("final_logit_softcapping"), "logit_scale": given.get("logit_scale", 1.0),
        }  # fmt: skip
        results = self.scored(given["last_hidden"], given["weight"], given["targets"], ("entropy",), head)
        if isinstance(results, tuple):
            logprobs, entropy = results[:2]
            assert entropy is not None
            # the backward of heads without a bias leaves the entropy out
            return logprobs, entropy if "bias" in self.parameters else entropy.detach()
        self.patch.left(contract.HEAD, results)
        theirs: tuple[Tensor | None, ...] = self.original.apply(*args)
        return theirs


def _looked_up(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """A helper of logits, which looks at what was scored already."""
    looking: dict[str, Callable[..., Any]] = {
        "selective_log_softmax": _selective_log_softmax,
        "entropy_from_logits": _entropy_from_logits,
        "selective_log_softmax_and_entropy": _selective_log_softmax_and_entropy,
    }
    look = looking[name]

    @functools.wraps(ours)
    def looked_up(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logits, ScoredLogits):
            return look(logits, *args, **kwargs)
        return ours(logits, *args, **kwargs)

    _looking.add(looked_up)
    return looked_up


def _blind_helper(function: Callable[..., Any]) -> str | None:
    """Why what TRL's function computes of logits is not looked up: its module has got a helper of somebody
    else since."""
    around = inspect.unwrap(function).__globals__
    for name in (ours.__name__ for ours in HELPERS):
        if name in around and around[name] not in _looking:
            return f"{around['__name__']}.{name} is somebody else's function"
    return None


# Rows under a mask have no label, and 0 already.


def _selective_log_softmax(
    logits: ScoredLogits, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    return logits.logprobs(index, temperature)


def _entropy_from_logits(logits: ScoredLogits, chunk_size: int = 128) -> Tensor:
    return logits.entropies()


def _selective_log_softmax_and_entropy(
    logits: ScoredLogits,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    entropies = logits.entropies(temperature)
    return logits.logprobs(index, temperature), entropies if entropy_requires_grad else entropies.detach()


def scored_method(original: Callable[..., Any], patch: CountedPatch) -> Callable[..., Any]:
    """The method of GRPO and RLOO that scores the tokens of completions."""
    signature = inspect.signature(original)

    def scored(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, model, *args, **kwargs).arguments
        asked = Asked(
            temperature=self.temperature,
            entropy=bool(given.get("compute_entropy")),
            of_loss=bool(getattr(self, "_entropy_bonus_enabled", False)),
            padding=contract.counts_padding(self),
            last=given["logits_to_keep"],
        )
        return run_scored(original, patch, [model], asked, self, model, *args, **kwargs)

    return shown(scored, original, "linear_logprob")


def _scored_loss(original: Callable[..., Any], patch: CountedPatch) -> Callable[..., Any]:
    """The loss of DPO and KTO, with the passes of the reference inside."""

    def scored(self: Any, model: Any, inputs: Mapping[str, Any], return_outputs: bool) -> Any:
        if _has_fused_head(self):
            return original(self, model, inputs, return_outputs)
        if reason := _reads_logits(self, return_outputs):
            patch.left(original.__qualname__, reason, quiet=reason == ASKED_FOR)
            return original(self, model, inputs, return_outputs)
        asked = Asked(entropy=True, statistics=(*STATISTICS,), masks=_masks(inputs), reference=self.ref_model)
        models = [model, self.model, self.ref_model]
        return run_scored(original, patch, models, asked, self, model, inputs, return_outputs)

    return scored


def _scored_reference(original: Callable[..., Any], patch: CountedPatch) -> Callable[..., Any]:
    """What DPO and KTO compute of the reference before they train."""

    def scored(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_fused_head(self):
            return original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        asked = Asked(masks=_masks(given["inputs"]))
        models = [given.get("model"), self.model, self.ref_model]
        return run_scored(original, patch, models, asked, self, *args, **kwargs)

    return scored


def _has_fused_head(trainer: Any) -> bool:
    """Whether a trainer of preferences makes no logits, as that of TRL 1.14 with ``use_liger_kernel``.  Under
    FSDP it calls its reference with other things than tokens."""
    return bool(getattr(trainer, "use_liger_kernel", False)) and hasattr(trainer, contract.METHOD)


def _reads_logits(trainer: Any, return_outputs: bool) -> str | None:
    """Why a trainer of preferences needs its logits themselves."""
    if return_outputs:
        return ASKED_FOR
    return "use_weighting reads the logits" if getattr(trainer, "use_weighting", False) else None


def _masks(inputs: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and which of them are of completions."""
    pairs = [(inputs.get(f"{kind}input_ids"), inputs.get(f"{kind}completion_mask")) for kind in ("", "KL_")]
    return [(ids, mask) for ids, mask in pairs if isinstance(ids, Tensor) and isinstance(mask, Tensor)]


def run_scored(
    original: Callable[..., Any],
    patch: CountedPatch,
    models: list[Any],
    asked: Asked,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The trainer's own function, in which each of ``models`` that can score tokens does."""
    name = original.__qualname__
    reason = unfit_temperature(asked.temperature) or _blind_helper(original)
    if reason is None:
        try:
            with scored_calls(models, asked, _strange) as calls:
                result = original(*args, **kwargs)
            for unable in calls.unable:
                patch.left(name, unable)
            if calls.made:
                patch.count(patch.calls, name)
            return result
        except HeadError as error:  # as a model is called for the first time
            reason = str(error)
    patch.left(name, reason)
    return original(*args, **kwargs)
