"""Put rlkernel under TRL's trainers: what is replaced by what, and how it is asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rlkernel.integrations import hf
from rlkernel.integrations._logit_helpers import HELPERS, helper
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.trl import contract, logits_head
from rlkernel.integrations.trl.distillation import Distillation
from rlkernel.integrations.trl.head import Head
from rlkernel.integrations.trl.invariant import Invariant, placed
from rlkernel.integrations.trl.passes import packed_method
from rlkernel.integrations.trl.prefix_sharing import PrefixSharing
from rlkernel.integrations.trl.rollouts import Rollouts
from rlkernel.integrations.trl.support import Support, supported_method
from rlkernel.integrations.trl.training_step import group_shuffle, watched_step
from rlkernel.integrations.trl.trl_patch import TrlPatch
from rlkernel.types import Dropout, Require


def patch(
    *,
    prefix_sharing: bool | Require = False,
    prefix_min_ratio: float | None = None,
    dropout: Dropout = "own",
    vllm: bool | Require = True,
    support: int = 0,
    batch_invariant: bool = False,
    strict: bool = True,
) -> TrlPatch:
    """Put rlkernel under TRL's trainers until ``undo()``, or until the end of the ``with`` block.

    A second call while the patch is on returns the same object; a ``with`` over it leaves the patch on.  What
    is left to TRL after all is counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        prefix_sharing: GRPOTrainer and RLOOTrainer compute each prompt once per group, in all their passes,
            and keep groups together when they shuffle.  ``"require"`` makes it an error to leave a batch to
            TRL.
        prefix_min_ratio: leave a batch to TRL that has fewer padded tokens for each row of the packed batch.
        dropout: ``"own"`` leaves a model that draws dropout to TRL, where each sample has a draw of its own.
            ``"shared"`` packs it: one draw for each row, which the samples that share the row share.
        vllm: a trainer with ``use_vllm`` brings ``patch_vllm()`` with it, until ``undo()``.  ``"require"``
            makes it an error where vLLM, or a part of what is replaced in it, is left as it is.  ``False``
            leaves vLLM alone.
        support: room for so many tokens that a rollout's filters kept for each that it drew.  They come with
            the samples of a colocated vLLM, and GRPOTrainer and RLOOTrainer score a token among those alone,
            as it was drawn.  Imports vLLM.
        batch_invariant: GRPOTrainer and RLOOTrainer compute of every sampled token the very log-probability
            that the rollout had, by vLLM or by ``generate``: ``rlkernel.batch_invariant`` is on while the
            patch is, here and in the engine.  What that does not cover is an error when a trainer is made.
        strict: take only the versions of TRL that have been run.  ``False`` takes any whose functions have
            the names and parameters of what is replaced.

    Raises:
        ValueError: an option is not one of its values, or is given without ``prefix_sharing``.
        ImportError: TRL is not installed.
        PatchError: the version of TRL is not supported, or what is to be replaced is not what that version
            has, or the patch is on with other options.  Nothing is replaced then.
    """
    _check_options(prefix_sharing, prefix_min_ratio, dropout, vllm, strict)
    _check_support(support, vllm, prefix_sharing)
    _check_invariance(batch_invariant, vllm)
    if (active := TrlPatch.in_place()) is not None:
        _check_same(active, prefix_sharing, prefix_min_ratio, dropout)
        _check_same_vllm(active, vllm, support)
        if batch_invariant and not active.batch_invariant:
            raise PatchError(
                "batch_invariant must be what the patch in place has, False, got True: undo it first"
            )
        return active.share()
    utils = contract.supported_utils(strict)
    result = TrlPatch(batch_invariant)
    if contract.is_fused():
        _plan_head(result, utils)
    else:
        _require_fused(support=support, batch_invariant=batch_invariant)
        logits_head.plan(result, utils)
    if prefix_sharing:
        result.prefix = PrefixSharing(
            result, prefix_min_ratio, required=prefix_sharing == "require", shared_dropout=dropout == "shared"
        )
        _plan_packing(result.prefix)
    invariant = Invariant(result, support) if batch_invariant else None
    if invariant is not None:
        invariant.plan()
    if vllm:
        result.rollouts = Rollouts(result, vllm == "require", support, invariant)
        result.rollouts.plan()
    if support:
        result.support = Support(result, support)
        result.support.plan()
    _plan_method(result, contract.is_fused())
    result.distillation = Distillation(result)
    return result.apply()


def _plan_method(result: TrlPatch, fused: bool) -> None:
    """Each part goes around the method that scores tokens."""
    if fused and not (result.prefix or result.support or result.batch_invariant):
        return
    for trainer in contract.trainers():
        name = contract.scoring_method(trainer)
        original = method = (contract.checked if fused else contract.checked_earlier)(trainer, name)
        if not fused:
            method = logits_head.scored_method(method, result)
        if result.prefix:
            method = packed_method(method, result.prefix, fused)
        if result.support:
            method = supported_method(method, result.support)
        if result.batch_invariant:
            method = placed(method)
        result.replace(trainer, name, method, expected=original)


def _plan_head(result: TrlPatch, utils: ModuleType) -> None:
    head = contract.checked(utils, contract.HEAD)
    result.replace(utils, contract.HEAD, Head(head, result, utils), expected=head)
    for ours in HELPERS:
        original = contract.checked(utils, ours.__name__)
        result.replace_everywhere("trl", ours.__name__, helper(ours, original, result), expected=original)


def _require_fused(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise PatchError(f"{name} must be left alone before TRL {contract.FUSED}, got {value!r}")


def _check_options(
    prefix_sharing: bool | str, prefix_min_ratio: float | None, dropout: str, vllm: bool | str, strict: bool
) -> None:
    for name, value in (("prefix_sharing", prefix_sharing), ("vllm", vllm)):
        if not isinstance(value, bool) and value != "require":
            raise ValueError(f"{name} must be True, False or 'require', got {value!r}")
    if dropout not in ("own", "shared"):
        raise ValueError(f"dropout must be 'own' or 'shared', got {dropout!r}")
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    if dropout != "own" and not prefix_sharing:
        raise ValueError(f"dropout must be 'own' without prefix_sharing, got {dropout!r}")
    if prefix_min_ratio is None:
        return
    if not prefix_sharing:
        raise ValueError(f"prefix_min_ratio must be None without prefix_sharing, got {prefix_min_ratio!r}")
    if (
        isinstance(prefix_min_ratio, bool)
        or not isinstance(prefix_min_ratio, int | float)
        or not prefix_min_ratio >= 1
    ):
        raise ValueError(f"prefix_min_ratio must be a number >= 1, got {prefix_min_ratio!r}")


def _check_same(
    active: TrlPatch, prefix_sharing: bool | str, prefix_min_ratio: float | None, dropout: str
) -> None:
    """A caller who asks for what the patch in place does not do would believe that it does."""
    if not prefix_sharing:
        return
    prefix = active.prefix
    found: Any
    wanted: Any
    if prefix is None or (prefix_sharing == "require" and not prefix.required):
        name, found, wanted = "prefix_sharing", prefix is not None, prefix_sharing
    elif prefix_min_ratio is not None and prefix.min_ratio != prefix_min_ratio:
        name, found, wanted = "prefix_min_ratio", prefix.min_ratio, prefix_min_ratio
    elif (dropout == "shared") != prefix.shared_dropout:
        name, found, wanted = "dropout", "shared" if prefix.shared_dropout else "own", dropout
    else:
        return
    raise PatchError(f"{name} must be what the patch in place has, {found}, got {wanted}: undo it first")


def _check_support(support: int, vllm: bool | str, prefix_sharing: bool | str) -> None:
    if not isinstance(support, int) or isinstance(support, bool) or not 0 <= support < 2**31:
        raise ValueError(f"support must be an integer in [0, 2**31), got {support!r}")
    if support and not vllm:
        raise ValueError(f"support must be 0 with vllm=False, got {support}")
    if support and prefix_sharing:
        raise ValueError(f"support must be 0 with prefix_sharing, got {support}")


def _check_invariance(batch_invariant: bool, vllm: bool | str) -> None:
    if not isinstance(batch_invariant, bool):
        raise ValueError(f"batch_invariant must be True or False, got {batch_invariant!r}")
    if batch_invariant and not vllm:
        raise ValueError("batch_invariant must be False with vllm=False, got True")


def _check_same_vllm(active: TrlPatch, vllm: bool | str, support: int) -> None:
    found = active.rollouts is not None and ("require" if active.rollouts.required else True)
    if vllm and found not in ("require", vllm):
        raise PatchError(f"vllm must be what the patch in place has, {found}, got {vllm}: undo it first")
    room = active.support.room if active.support else 0
    if support not in (0, room):
        raise PatchError(f"support must be what the patch in place has, {room}, got {support}: undo it first")


def _plan_packing(sharing: PrefixSharing) -> None:
    import trl.trainer.grpo_trainer as grpo  # takes seconds
    import trl.trainer.rloo_trainer as rloo

    hf.register_hf()  # raises now if it cannot, not in the first step
    for module, trainer in ((grpo, grpo.GRPOTrainer), (rloo, rloo.RLOOTrainer)):
        for owner, name, make in (
            (trainer, contract.STEP, watched_step),
            (module, contract.SHUFFLE, group_shuffle),
        ):
            original = contract.checked(owner, name)
            sharing.patch.replace(owner, name, make(original, sharing), expected=original)
