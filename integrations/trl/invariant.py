"""One number in TRL's trainers and in their rollouts: what ``patch_trl(batch_invariant=True)`` adds.

``rlkernel.batch_invariant`` is on while the patch is.  Here is what TRL leaves to be done around it:
positions that count no padding, passes of ``generate`` that are strict as the trainer's are, options of a
colocated engine, an empty prefix cache behind new weights, and a look at what the mode does not cover when a
trainer is made.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

import rlkernel
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl import contract, invariant_reasons
from rlkernel.integrations.trl.invariant_trial import tried
from rlkernel.integrations.vllm import VllmPatch


class Invariant:
    """The part of a ``TrlPatch`` that gives trainers the numbers of their rollouts."""

    def __init__(self, patch: CountedPatch, room: int) -> None:
        self.patch = patch
        self.room = room  # for the kept tokens of a sampled one
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()  # that were made under the patch

    def plan(self) -> None:
        """Raises PatchError where TRL is not what it must be."""
        import trl.generation.vllm_generation as generation

        owner = generation.VLLMGeneration
        for name, make in ((contract.ENGINE, self._engine), (contract.SYNC, _emptied)):
            original = contract.checked(owner, name)
            self.patch.replace(owner, name, make(original, generation), expected=original)
        for trainer in contract.trainers():
            module = sys.modules[trainer.__module__]
            original = contract.checked(module, contract.UNWRAP)
            self.patch.replace(module, contract.UNWRAP, _strict(original), expected=original)
            original = vars(trainer)[contract.BEGIN]
            self.patch.replace(trainer, contract.BEGIN, self._made(original), expected=original)

    # trainers

    def prepare(self, trainer: Any) -> None:
        """Raises ValueError where a trainer's numbers could not be those of its rollouts."""
        if _scores_groups(trainer):
            _require("the trainer", invariant_reasons.of_trainer(trainer, self.room))
        elif getattr(trainer.args, "use_vllm", False):
            name = type(trainer).__name__
            _require("the trainer", f"the scores of GRPOTrainer or RLOOTrainer to use vLLM, got {name}")

    def begin(self, trainer: Any) -> None:
        """The same when training begins, also of a trainer that was made before the patch."""
        self.prepare(trainer)
        if not _scores_groups(trainer):
            return
        if not trainer.args.use_vllm:
            self._try(trainer.model, trainer.temperature, cached=True)
        elif trainer.vllm_generation not in self._engines:
            _require("the trainer", "an engine that was made while the patch was on")

    def _try(self, model: Any, temperature: float, cached: bool) -> None:
        _require("the model", tried(model, temperature, cached))

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            if not trainer.args.use_vllm:
                self._try(trainer.model, trainer.temperature, cached=True)

        return __init__

    # engines

    def _engine(self, original: Callable[[Any], None], module: Any) -> Callable[[Any], None]:
        def _init_vllm(generation: Any) -> None:
            self._try(generation.model, generation.temperature, cached=False)
            dtype = generation.model.dtype
            if generation.mode == "colocate":
                on = VllmPatch.in_place()
                _require("vLLM", invariant_reasons.of_patch(on))
                with _options(module, dtype=dtype, enforce_eager=True):
                    original(generation)
            else:
                original(generation)
                if generation.accelerator.is_main_process:
                    _require("the server", invariant_reasons.of_server(generation.vllm_client, dtype))
            self._engines.add(generation)

        return _init_vllm


def _scores_groups(trainer: Any) -> bool:
    return isinstance(trainer, contract.trainers())


def _require(what: str, reason: str) -> None:
    if reason:
        raise ValueError(f"{what} must have {reason} (patch_trl(batch_invariant=True))")


@contextlib.contextmanager
def _options(module: Any, **options: Any) -> Iterator[None]:
    """Inside, TRL makes its engine with options that it has no names for."""
    theirs = module.LLM
    module.LLM = functools.partial(theirs, **options)
    try:
        yield
    finally:
        module.LLM = theirs


def _emptied(original: Callable[[Any], None], _: Any) -> Callable[[Any], None]:
    """TRL empties the prefix cache too, and does not look whether it could be."""

    def sync_weights(generation: Any) -> None:
        original(generation)
        if generation.mode == "colocate" and not generation.llm.reset_prefix_cache():
            raise RuntimeError("vLLM must forget the prefixes of former weights, got a cache that is in use")

    return sync_weights


def _strict(original: Callable[..., Any]) -> Callable[..., Any]:
    """What TRL generates with: what a pass cannot do as the trainer does is an error in the rollout too."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(*args, **kwargs) as model, _strict_passes(model):
            yield model

    return unwrap_model_for_generation


@contextlib.contextmanager
def _strict_passes(model: Any) -> Iterator[None]:
    """Inside, ``model`` runs under the strict mode, and what samplers make of its logits does not."""
    inside = model.get_base_model() if hasattr(model, "peft_config") else model
    with contextlib.ExitStack() as hooks, contextlib.ExitStack() as modes:

        def enter(module: Any, args: Any) -> None:
            modes.enter_context(rlkernel.batch_invariant())

        def leave(module: Any, args: Any, output: Any) -> None:
            modes.close()

        hooks.callback(inside.register_forward_pre_hook(enter).remove)
        hooks.callback(inside.register_forward_hook(leave, always_call=True).remove)
        yield


def placed(original: Callable[..., Any]) -> Callable[..., Any]:
    """TRL's scores, of a model that is told where tokens stand: TRL counts the padding on the left too."""

    @functools.wraps(original)
    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        inside = self.accelerator.unwrap_model(model)
        longest = int(attention_mask.sum(1).max()) if len(attention_mask) else 0
        _require("the trainer", invariant_reasons.of_length(inside, longest))
        hook = inside.register_forward_pre_hook(_with_positions, with_kwargs=True)
        try:
            with rlkernel.batch_invariant():  # strict, where the patch's own mode lets others pass
                return original(self, model, input_ids, attention_mask, *args, **kwargs)
        finally:
            hook.remove()

    return _get_per_token_logps_and_entropies


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Of the tokens of padded rows, as ``generate`` of transformers counts them: [B, T]."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def _with_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and kwargs.get("position_ids") is None:
        kwargs = kwargs | {"position_ids": positions(mask)}
    return args, kwargs
