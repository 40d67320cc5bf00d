"""SkyRL's policy losses as ``policy_loss`` has them: options by SkyRL's config, and SkyRL's metrics.

SkyRL sums tokens up, whose advantages its trainer has divided by what the loss is a mean of
(``loss_reduction``).  Rollout weights (TIS) multiply a token's loss, which is a multiple of the size of its
advantage: so they multiply that.  So do the masks of ``off_policy_correction``, so that a sequence's ratio is
of all its tokens, as in SkyRL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.policy_loss import POLICY_METRICS
from rlkernel.integrations._replacing import Arguments, differing, misplaced, unfit_numbers, unsuitable
from rlkernel.integrations.skyrl import contract
from rlkernel.integrations.skyrl.replacing import Left
from rlkernel.ops.policy_loss import policy_loss

RATIO_BOUND = 20.0  # of the logarithm of a ratio, in most of SkyRL's losses
SEQUENCE_BOUND = 10.0  # in its GSPO
CORRECTION = f"{contract.BACKEND}.utils.off_policy_correction_utils"
WEIGHTS = "loss_mask holds other numbers than 0 and 1"

Options = dict[str, Any]
Metrics = dict[str, float]
Sums = tuple[str, ...]  # the metrics of ``policy_loss`` whose sum is SkyRL's
CLIPS: Sums = ("clip_fraction_low", "clip_fraction_high")


class Loss(NamedTuple):
    """One of SkyRL's policy losses."""

    function: str
    names: tuple[str, ...]  # in the registry
    options: Callable[[Any], Options]  # by a config
    metric: str = "clip_ratio"
    sums: Sums = CLIPS
    old: str | None = "old_log_probs"  # the argument that the ratio is to
    weighted: bool = False  # the mask holds weights, and there is no advantage
    corrected: bool = True  # by off_policy_correction
    of_sequences: bool = False  # best with loss_reduction "sequence_mean", SkyRL says


def unable(loss: Loss, given: Arguments) -> str | None:
    config, mask = given["config"], given["loss_mask"]
    if mask is None:
        return "there is no loss_mask"
    tensors = {"log_probs": given["log_probs"]}
    if not loss.weighted:
        tensors["advantages"] = given["advantages"]
    if loss.old is not None:
        tensors[loss.old] = given[loss.old]
    if _correction(loss, given) is not None:
        tensors |= {name: given[name] for name in ("old_log_probs", "rollout_logprobs")}
    if reason := unsuitable(**tensors) or misplaced(loss_mask=mask):
        return reason
    if reason := differing(**tensors, loss_mask=mask):
        return reason
    try:
        options = loss.options(config)
    except AttributeError:
        return "the config is none of an algorithm"
    return _refused(options)


def _refused(options: Options) -> str | None:
    """What SkyRL refuses, and so says itself; and numbers that ``policy_loss`` refuses."""
    if options.get("policy_loss_type", "regular") not in ("regular", "dual_clip"):
        return "policy_loss_type is another loss"
    if reason := unfit_numbers(options):
        return reason
    if not options.get("clip_ratio_c", 2.0) > 1.0:
        return "clip_ratio_c is not above 1"
    if not all(options[name] > 0 for name in ("tau_pos", "tau_neg") if name in options):
        return "a temperature of the gate is not above 0"
    if not all(options[name] >= 0 for name in ("epsilon", "epsilon_high") if name in options):
        return "a bound of the ratio is below 0"
    if options.get("loss_type") == "cispo_mask" and options["epsilon"] == options["epsilon_high"] == 0:
        return "no ratio is within the bounds"  # policy_loss counts a ratio of 1 as clipped on both sides
    return None


def run(loss: Loss, given: Arguments) -> tuple[Tensor, Metrics]:
    options, mask = loss.options(given["config"]), given["loss_mask"]
    options.pop("policy_loss_type", None)
    options["loss_agg_mode"] = "token-sum"
    new, old = given["log_probs"], None if loss.old is None else given[loss.old]
    if loss.weighted:
        return policy_loss(new, old, mask.to(_wide(new)), mask, **options).loss, {loss.metric: 0.0}
    advantages, further, kept = _corrected(loss, given)
    out = policy_loss(new, old, advantages, mask, **options)
    metrics = out.metrics
    if kept and loss.sums:  # SkyRL counts before it corrects
        metrics = policy_loss(new.detach(), old, given["advantages"], mask, **options).metrics
    read = [metrics[POLICY_METRICS.index(name)] for name in (*loss.sums, "tokens")]
    *parts, tokens, odd = torch.stack([*read, weights(mask)]).tolist()  # one synchronisation
    if odd:
        raise Left(WEIGHTS)
    if loss.of_sequences and given["config"].loss_reduction != "sequence_mean":
        _advise(loss, given["config"].loss_reduction)
    value = float("nan") if not tokens and loss.metric == "importance_ratio" else sum(parts, 0.0)
    return out.loss, {loss.metric: value} | further


def weights(mask: Tensor) -> Tensor:
    """Whether a mask holds others than 0 and 1."""
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.float32, device=mask.device)
    return ((mask != 0) & (mask != 1)).any().float()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _correction(loss: Loss, given: Arguments) -> Any:
    """SkyRL's settings of it, where there is one to make."""
    if not loss.corrected or given["rollout_logprobs"] is None:
        return None
    settings = getattr(given["config"], "off_policy_correction", None)
    home = importlib.import_module(CORRECTION)
    return settings if settings is not None and home.off_policy_correction_enabled(settings) else None


def _corrected(loss: Loss, given: Arguments) -> tuple[Tensor, Metrics, bool]:
    """The advantages under SkyRL's own weights and masks, its metrics of them, and whether any mask is
    there."""
    settings, advantages, mask = _correction(loss, given), given["advantages"], given["loss_mask"]
    if settings is None:
        return advantages, {}, False
    home = importlib.import_module(CORRECTION)
    ratios, metrics, kept = home.compute_off_policy_correction(
        given["old_log_probs"], given["rollout_logprobs"], mask, settings
    )
    if ratios is not None:
        advantages = advantages * ratios
    if kept is not mask:
        advantages = torch.where(kept != 0, advantages, 0)
    return advantages, metrics, kept is not mask


def _advise(loss: Loss, reduction: str) -> None:
    from loguru import logger  # SkyRL's

    name = loss.names[0].upper()
    logger.warning(f"With {name} it's recommended to use 'sequence_mean' loss reduction; got {reduction}")


# options


def _bounds(config: Any) -> Options:
    return {"epsilon": config.eps_clip_low, "epsilon_high": config.eps_clip_high}


def _ppo(config: Any) -> Options:
    kind = config.policy_loss_type
    dual = {"clip_ratio_c": config.clip_ratio_c} if kind == "dual_clip" else {}
    bound = {"loss_type": "ppo", "log_ratio_clip": RATIO_BOUND, "policy_loss_type": kind}
    return _bounds(config) | dual | bound


def _gspo(config: Any) -> Options:
    level = {"importance_sampling_level": "sequence_token", "log_ratio_clip": SEQUENCE_BOUND}
    return _bounds(config) | level


def _sapo(config: Any) -> Options:
    taus = {"tau_pos": config.sapo.tau_pos, "tau_neg": config.sapo.tau_neg}
    return {"loss_type": "sapo", "log_ratio_clip": RATIO_BOUND, **taus}


def _cispo(config: Any) -> Options:
    low, high = config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high
    return {"loss_type": "cispo", "epsilon": low, "epsilon_high": high, "log_ratio_clip": RATIO_BOUND}


def _rollout_is(config: Any) -> Options:
    return _bounds(config) | {"loss_type": "cispo_mask", "log_ratio_clip": RATIO_BOUND}


def _importance_sampling(config: Any) -> Options:
    return {"loss_type": "importance_sampling"}


def _likelihood(config: Any) -> Options:
    return {"loss_type": "reinforce"}


# SkyRL picks some of the tokens of clip_cov at random, and of kl_cov by covariances that it rounds to fp32;
# its dppo has the value r A where policy_loss has r A logprob, of the same gradient: they are left to it.
LOSSES = (
    Loss("ppo_policy_loss", ("regular", "dual_clip"), _ppo),
    Loss("gspo_policy_loss", ("gspo",), _gspo, of_sequences=True),
    Loss("sapo_policy_loss", ("sapo",), _sapo, sums=(), of_sequences=True),
    Loss("compute_policy_loss_cispo", ("cispo",), _cispo),
    Loss("rollout_is_policy_loss", ("rollout_is",), _rollout_is, old="rollout_logprobs"),
    Loss("cross_entropy_loss", ("cross_entropy",), _likelihood, old=None, weighted=True, corrected=False),
    Loss(
        "importance_sampling_loss", ("importance_sampling",), _importance_sampling,
        metric="importance_ratio", sums=("ratio_mean",), corrected=False,
    ),
)  # fmt: skip
