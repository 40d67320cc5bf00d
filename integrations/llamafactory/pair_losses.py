"""The losses of ``CustomDPOTrainer``: TRL's of log-ratios, and its own ORPO and SimPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import ABSENT, PatchError
from rlkernel.integrations._preferences import loss_of_pairs, unfit_beta, unfit_pairs
from rlkernel.integrations._replacing import Arguments, finite, replacement
from rlkernel.integrations.llamafactory import contract
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch

DPO_LOSS = "dpo_loss"
POLICY, REFERENCE = ("chosen_logps", "rejected_logps"), ("ref_chosen_logps", "ref_rejected_logps")
KINDS = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_sum"}  # ipo's are means already


def plan(patch: LlamafactoryPatch, trainer: Any) -> None:
    """Add what is replaced to a patch."""
    inherited = _trls(trainer)
    new = replacement(patch, inherited, "preference_loss", _unable_dpo, _dpo)
    patch.replace(trainer, DPO_LOSS, new, expected=ABSENT)
    for name, unable, run in (("odds_ratio_loss", _unable, _orpo), ("simpo_loss", _unable_simpo, _simpo)):
        original = contract.checked(trainer, name)
        new = replacement(patch, original, "preference_loss", unable, run)
        patch.replace(trainer, name, new, expected=original)


def _trls(trainer: Any) -> Callable[..., Any]:
    """TRL's loss, whose kind is the trainer's before TRL 0.20, and an argument since."""
    if DPO_LOSS in vars(trainer):
        raise PatchError(f"{trainer.__name__}.{DPO_LOSS} must be TRL's, got one of its own")
    found = getattr(trainer, DPO_LOSS, None)
    if found is None or (taken := _contract.taken(found)) not in contract.DPO_LOSS:
        known = " or ".join(f"({', '.join(x)})" for x in contract.DPO_LOSS)
        got = "none" if found is None else f"({', '.join(taken)})"
        raise PatchError(f"{trainer.__name__}.{DPO_LOSS} must take {known}, got {got}")
    return found


def _policy(given: Arguments) -> dict[str, Tensor]:
    return {name: given[name] for name in POLICY}


def _reference(given: Arguments) -> dict[str, Tensor]:
    return {name: given[name] for name in REFERENCE}


# of log-ratios


def _unable_dpo(given: Arguments) -> str | None:
    trainer = given["self"]
    if reason := unfit_pairs(_policy(given), _reference(given)) or unfit_beta(trainer.beta):
        return reason
    kind = given.get("loss_type", trainer.loss_type)
    if kind != trainer.loss_type:
        return (
            f"TRL takes the loss by an argument that LLaMA-Factory does not give, and computes {kind!r} for "
            f"pref_loss: {trainer.loss_type}"
        )
    if kind not in KINDS:
        return f"pref_loss: {kind} is none of TRL's"
    if not finite(trainer.label_smoothing) or not 0 <= trainer.label_smoothing <= 1:
        return "label_smoothing is no number in [0, 1]"
    if trainer.reference_free or trainer.f_divergence_type != "reverse_kl":
        return "the log-ratios are not those of reverse_kl to a reference"
    return None


def _dpo(given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    trainer = given["self"]
    smoothing = trainer.label_smoothing if trainer.loss_type == "sigmoid" else 0.0
    out = loss_of_pairs(
        _policy(given), _reference(given), beta=trainer.beta, loss_type=KINDS[trainer.loss_type],
        label_smoothing=smoothing,
    )  # fmt: skip
    return _of_each(out.loss, given), out.chosen_rewards.detach(), out.rejected_rewards.detach()


# without a reference


def _unable(given: Arguments) -> str | None:
    return unfit_pairs(_policy(given), {}) or unfit_beta(given["self"].beta)


def _unable_simpo(given: Arguments) -> str | None:
    return _unable(given) or (None if finite(given["self"].simpo_gamma) else "simpo_gamma is no number")


def _orpo(given: Arguments) -> Tensor:
    loss = loss_of_pairs(_policy(given), {}, beta=given["self"].beta, loss_type="orpo").loss
    return _of_each(loss, given)


def _simpo(given: Arguments) -> Tensor:
    trainer = given["self"]
    options = {"beta": trainer.beta, "gamma": trainer.simpo_gamma, "loss_type": "simpo"}
    return _of_each(loss_of_pairs(_policy(given), {}, **options).loss, given)


def _of_each(loss: Tensor, given: Arguments) -> Tensor:
    """The mean in the place of the loss of each pair: LLaMA-Factory adds to them, and means them."""
    return loss.repeat(len(given["chosen_logps"]))
