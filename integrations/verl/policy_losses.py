"""verl's policy losses as ``policy_loss`` has them: options by verl's config, and verl's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.policy_loss import POLICY_METRICS
from rlkernel.integrations._replacing import Arguments, unfit_numbers
from rlkernel.ops.policy_loss import policy_loss

RATIO_BOUND = 20.0  # of the logarithm of a ratio, in most of verl's losses
SEQUENCE_BOUND = 10.0  # in its GSPO
KL, CLIPPED, FAR = "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"

Options = dict[str, Any]
Metrics = dict[str, float]
Sums = dict[str, tuple[str, ...]]  # verl's metric: those of ``policy_loss`` whose sum it is
OF_KL: Sums = {KL: ("approx_kl_k1",)}
NOTHING: Sums = {CLIPPED: (), **OF_KL, FAR: ()}  # verl's shares of clipped tokens are 0
CLIPS: Sums = NOTHING | {CLIPPED: ("clip_fraction_low", "clip_fraction_high")}


class Loss(NamedTuple):
    """One of verl's policy losses."""

    function: str
    mode: str | None  # its name in the registry
    options: Callable[[Any], Options]  # by a config
    metrics: Sums
    further: Callable[[Arguments, Options, Metrics], Metrics] | None = None
    old: str | None = "old_log_prob"  # the argument that the ratio is to
    weighed: Callable[[Arguments], Tensor] | None = None  # the advantages under rollout_is_weights
    aggregation: str | None = None  # whatever is asked for
    of_all: bool = False  # the mean is over all sequences, empty ones too
    of_actor: bool = False  # verl takes no other config than its ActorConfig


def sums(values: list[float], wanted: Sums) -> Metrics:
    return {
        name: sum((values[POLICY_METRICS.index(ours)] for ours in parts), 0.0)
        for name, parts in wanted.items()
    }


# options


def unable(loss: Loss, config: Any) -> str | None:
    """What verl refuses, and so says itself; and numbers that ``policy_loss`` refuses."""
    try:
        options = loss.options(config)
    except AttributeError:
        return "the config is none of an actor"
    if loss.of_actor and not _is_of_an_actor(config):
        return "the config is none of an actor"
    if reason := unfit_numbers(options):
        return reason
    for name in ("tau_pos", "tau_neg", "dro_beta"):
        if not options.get(name, 1.0) > 0:
            return f"{name} is not above 0"
    if options.get("clip_ratio_c", 2.0) <= 1.0:
        return "clip_ratio_c is not above 1"
    if not all(options[name] >= 0 for name in ("epsilon", "epsilon_high") if name in options):
        return "a bound of the ratio is below 0"
    return None


def _is_of_an_actor(config: Any) -> bool:
    from verl.workers.config import ActorConfig

    return isinstance(config, ActorConfig)


def _bounds(config: Any) -> Options:
    low, high = (
        config.clip_ratio if bound is None else bound
        for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    return {"epsilon": low, "epsilon_high": high}


def _vanilla(config: Any) -> Options:
    dual = config.get("clip_ratio_c", 3.0)
    return _bounds(config) | {"loss_type": "ppo", "clip_ratio_c": dual, "log_ratio_clip": RATIO_BOUND}


def _dppo(loss_type: str) -> Callable[[Any], Options]:
    def options(config: Any) -> Options:
        cap = config.get("clip_ratio_c", 20.0)
        return _bounds(config) | {"loss_type": loss_type, "clip_ratio_c": cap, "log_ratio_clip": RATIO_BOUND}

    return options


def _gspo(config: Any) -> Options:
    level = {"importance_sampling_level": "sequence_token", "log_ratio_clip": SEQUENCE_BOUND}
    return _bounds(config) | level


def _sapo(config: Any) -> Options:
    taus = {"tau_pos": config.tau_pos, "tau_neg": config.tau_neg}
    return {"loss_type": "sapo", "log_ratio_clip": RATIO_BOUND, **taus}


def _cispo(config: Any) -> Options:
    return _bounds(config) | {"loss_type": "cispo", "log_ratio_clip": RATIO_BOUND}


def _geo_mean(config: Any) -> Options:
    return _bounds(config) | {"loss_type": "gmpo", "importance_sampling_level": "sequence"}


def _likelihood(config: Any) -> Options:
    return {"loss_type": "reinforce"}


def _dro(config: Any) -> Options:
    return {"loss_type": "dro", "dro_beta": config.policy_loss.dro_beta}


# advantages under weights: a loss that is a multiple of the size of the advantage is weighed by weighing that


def _by_token(given: Arguments) -> Tensor:
    return given["advantages"] * given["rollout_is_weights"]


def _by_sequence(given: Arguments) -> Tensor:
    """By the geometric mean of the weights of each sequence, as verl takes it."""
    mask = given["response_mask"].bool()
    logs = torch.where(mask, torch.log(given["rollout_is_weights"] + 1e-10), 0).sum(-1, keepdim=True)
    return given["advantages"] * (logs / (mask.sum(-1, keepdim=True) + 1e-8)).exp()


# metrics that are no sum of those of ``policy_loss``


def _far_and_valid(given: Arguments, options: Options, tokens: Metrics) -> Metrics:
    """The share of tokens whose ratio is beyond the cap and whose divergence is within its bounds."""
    new, old, mask = given["log_prob"].detach(), given["old_log_prob"], given["response_mask"]
    far = mask.bool() & (new - old > math.log(options["clip_ratio_c"]))
    values = policy_loss(new, old, given["advantages"], far, **options).metrics.tolist()
    found = sums(values, {"tokens": ("tokens",), CLIPPED: CLIPS[CLIPPED]})
    return {FAR: found["tokens"] * (1 - found[CLIPPED]) / max(tokens["tokens"], 1.0)}


def _clipped_by_sign(given: Arguments, options: Options, tokens: Metrics) -> Metrics:
    """The shares of tokens whose difference is out of bounds, on either side, by the sign of the
    advantage."""
    mask, advantages = given["response_mask"].bool(), given["advantages"]
    difference = given["log_prob"].detach() - given["old_log_prob"]
    out = ((difference < -options["epsilon"]) | (difference > options["epsilon_high"])) & mask
    above, below = torch.stack([(out & (advantages > 0)).sum(), (out & (advantages < 0)).sum()]).tolist()
    count = max(tokens["tokens"], 1.0)
    return {CLIPPED: above / count, FAR: below / count}


# verl picks some of the tokens of clip_cov at random, and of kl_cov by covariances that it rounds to fp32:
# they are left to it, and so is bypass_mode, which calls two of these.
LOSSES = (
    Loss(
        "compute_policy_loss_vanilla", "vanilla", _vanilla, CLIPS | {FAR: ("clip_fraction_far",)},
        weighed=_by_token,
    ),
    Loss(
        "compute_policy_loss_dppo_tv", "dppo_tv", _dppo("dppo_tv"), CLIPS, _far_and_valid, weighed=_by_token
    ),
    Loss(
        "compute_policy_loss_dppo_kl", "dppo_kl", _dppo("dppo_kl"), CLIPS, _far_and_valid, weighed=_by_token
    ),
    Loss("compute_policy_loss_gspo", "gspo", _gspo, CLIPS, weighed=_by_token, of_actor=True),
    Loss(
        "compute_policy_loss_sapo", "sapo", _sapo, NOTHING, weighed=_by_token,
        aggregation="seq-mean-token-mean", of_actor=True,
    ),
    Loss("compute_policy_loss_gpg", "gpg", _likelihood, {}, old=None, weighed=_by_token),
    Loss(
        "compute_policy_loss_geo_mean", "geo_mean", _geo_mean, NOTHING, _clipped_by_sign,
        weighed=_by_sequence, aggregation="seq-mean-token-mean", of_all=True,
    ),
    Loss("compute_policy_loss_dro", "dro", _dro, OF_KL),  # its penalty is no multiple of the advantage
    Loss("compute_policy_loss_cispo", "cispo", _cispo, CLIPS, weighed=_by_token, of_actor=True),
    Loss(
        "compute_policy_loss_reinforce", None, _likelihood, OF_KL, old="rollout_log_prob", weighed=_by_token
    ),
)  # fmt: skip
