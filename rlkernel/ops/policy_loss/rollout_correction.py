"""The drift between the engine that sampled and the trainer: weights, rejection, staleness, presets."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from rlkernel.calls.policy_loss import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    DIVERGENCES,
    PolicyLossCall,
)
from rlkernel.ops import _validate
from rlkernel.runtime import invariance
from rlkernel.types import CorrectionDenominator, CorrectionLevel, CorrectionMode, Divergence

T = TypeVar("T")
Bounds = tuple[float, float]


class RolloutCorrection(NamedTuple):
    """A weight for each token against the drift between the rollout engine and the trainer's old policy, and
    what is rejected.  Neither has a gradient.

    With ``d = old_logprobs - rollout_logprobs``, 0 where ``rollout_logprobs`` is NaN or -inf or the old
    one is -inf, the ratio is ``exp(d)`` of the token (``level`` "token"), ``exp(sum of d)`` of its sequence
    ("sequence"), ``exp(mean of d)`` ("geometric") or 1 ("none").  ``mode`` "truncate" clamps it to [low,
    high]; "mask" makes it 0 outside of them (MIS, IcePop); "reject" rejects outside of them, and the weight
    is 1.

    ``reject``: any of ``(name, low, high)`` for a ratio, ``(name, high)`` for a divergence; all must hold.

        token_k1  exp(d)              token_k2  d^2 / 2           token_k3  exp(d) - 1 - d
        seq_sum_k1, seq_mean_k1       exp of the sum or mean of d; "seq_sum_k2", "seq_mean_k3" ...: of those
        seq_max_k1, _k2, _k3          every token of the sequence must hold the bound

    In sums and means each d is clamped to [-20, 20], as verl does.  ``veto`` is ``seq_max_k1`` with a lower
    bound alone.  ``off_policy_threshold`` rejects tokens with a negative advantage in sequences whose mean of
    ``rollout_logprobs - logprobs`` is above it.  ``dppo = (divergence, low, high)`` rejects a token that has
    moved from its rollout probability q to p further than that in the direction of its advantage; the
    divergence is "tv", |p - q|, or "kl" of the choice between this token and any other; with ``two_sided``
    whatever the advantage.  ``tv_threshold`` rejects the tokens whose d has the sign of their advantage in
    sequences whose mean of ``|exp(d) - 1|`` is above it (VACO, open-instruct).  ``m2_threshold`` takes tokens
    out of the mask, those with the largest d^2 of the batch first, until the mean of d^2 over the others is
    below it; one is always left (M2PO, AReaL).

    ``policy_loss(staleness=...)`` counts versions of the policy since the token was sampled: beyond
    ``max_staleness`` it is rejected; ``staleness_decay`` multiplies the weight once for each version; with
    ``stale_only`` tokens of staleness 0 have the weight 1.

    ``normalize`` divides the weights by their mean over the tokens ("token", "none") or sequences of this
    call, rejected ones included.  ``denominator`` "keep" leaves rejected tokens in the mean of the loss, as
    TRL, NeMo-RL, SkyRL and verl's IcePop do; "shrink" takes them out of the mask, and so out of the KL, the
    entropy and the sequence's ratio, as verl's rollout_rs and Miles do.

    Presets, by name in ``policy_loss(correction=...)``:

        token_tis        min(r, 2), Yao et al. "Your efficient RL framework secretly brings you off-policy RL
                         training"; seq_tis: of the sequence
        icepop           r where 0.5 <= r <= 5, else 0
        geometric_rejection    1 where 0.999 <= geometric r <= 1.001
        verl:<name>      verl.trainer.config.RolloutCorrectionConfig.<name>() with its defaults; its k1 bounds
                         hold for 1 / r (compute_rollout_rejection_mask compares -d), and so do these
        trl:sequence_mask, sequence_truncate, token_mask, token_truncate
                         GRPOConfig.vllm_importance_sampling_mode with clip_max 3
        skyrl:token_tis, sequence_tis   off_policy_correction.tis_ratio_type, caps 2 and 5
        skyrl:geometric, product, outlier   sequence_mask_metric 0.99..1.01 and 0.5..2, outlier_token 1e-4
                         to 100 (compute_off_policy_correction)
        nemo_rl:tis, icepop, seq_mask_tis   truncated_importance_sampling_type: min(r, 2); r in 0.5..5;
                         raw r in sequences with a geometric mean in 0.999..1.002 (ClippedPGLossFn)
        slime:tis, icepop   --use-tis with its --tis-clip 2, --tis-clip-low 0; icepop_function with the same
        prime_rl:dppo, ipo    ("tv", 0.2, 0.2), and ("tv", 0.1, 0.1) on both sides, for which old_logprobs are
                         the rollout's
        areal:m2po       m2_threshold 0.04, of its example

    Examples:
        >>> old, rollout = torch.full((1, 2), -1.0), torch.tensor([[-1.0, -2.0]])
        >>> correction = rlkernel.RolloutCorrection("token", "truncate", high=2.0)
        >>> options = {"rollout_logprobs": rollout, "correction": correction}
        >>> rlkernel.policy_loss(old, old, torch.ones(1), torch.ones(1, 2), **options).loss
        tensor(-1.5000)
    """

    level: CorrectionLevel = "token"
    mode: CorrectionMode = "truncate"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None
    denominator: CorrectionDenominator = "keep"
    reject: tuple[tuple[Any, ...], ...] = ()
    normalize: bool = False
    dppo: tuple[Divergence, float, float] | None = None
    two_sided: bool = False
    off_policy_threshold: float | None = None
    tv_threshold: float | None = None
    m2_threshold: float | None = None
    max_staleness: float | None = None
    staleness_decay: float = 1.0
    stale_only: bool = False


_NONE = RolloutCorrection("none")
# verl compares -d with the logarithms of its bounds
_GEO: dict[str, Any] = {"reject": (("seq_mean_k1", 1 / 1.001, 1 / 0.999),), "denominator": "shrink"}
_K3: dict[str, Any] = {"reject": (("seq_mean_k3", 0.01),), "denominator": "shrink"}

CORRECTIONS = {
    "token_tis": RolloutCorrection(),
    "icepop": RolloutCorrection(mode="mask", low=0.5, high=5.0),
    "seq_tis": RolloutCorrection(level="sequence"),
    "geometric_rejection": RolloutCorrection("geometric", "reject", 0.999, 1.001),
    "verl:decoupled_token_is": RolloutCorrection(),
    "verl:decoupled_seq_is": RolloutCorrection("sequence"),
    "verl:decoupled_token_icepop": RolloutCorrection(mode="mask", low=0.5, high=5.0),
    "verl:decoupled_seq_is_rs": RolloutCorrection(
        "sequence", reject=(("seq_sum_k1", 0.5, 2.0),), denominator="shrink"
    ),
    "verl:decoupled_geo_rs": _NONE._replace(**_GEO),
    "verl:decoupled_geo_rs_seq_tis": RolloutCorrection("sequence", **_GEO),
    "verl:decoupled_geo_rs_token_tis": RolloutCorrection(**_GEO),
    "verl:decoupled_k3_rs": _NONE._replace(**_K3),
    "verl:decoupled_k3_rs_seq_tis": RolloutCorrection("sequence", **_K3),
    "verl:decoupled_k3_rs_token_tis": RolloutCorrection(**_K3),
    "trl:sequence_mask": RolloutCorrection(level="sequence", mode="mask", high=3.0),
    "trl:sequence_truncate": RolloutCorrection(level="sequence", high=3.0),
    "trl:token_mask": RolloutCorrection(mode="mask", high=3.0),
    "trl:token_truncate": RolloutCorrection(high=3.0),
    "skyrl:token_tis": RolloutCorrection(),
    "skyrl:sequence_tis": RolloutCorrection("sequence", high=5.0),
    "skyrl:geometric": RolloutCorrection("geometric", "reject", 0.99, 1.01),
    "skyrl:product": RolloutCorrection("sequence", "reject", 0.5, 2.0),
    "skyrl:outlier": _NONE._replace(reject=(("seq_max_k1", 1e-4, 100.0),)),
    "nemo_rl:tis": RolloutCorrection(),
    "nemo_rl:icepop": RolloutCorrection(mode="mask", low=0.5, high=5.0),
    "nemo_rl:seq_mask_tis": RolloutCorrection(high=math.inf, reject=(("seq_mean_k1", 0.999, 1.002),)),
    "slime:tis": RolloutCorrection(),
    "slime:icepop": RolloutCorrection(mode="mask"),
    "prime_rl:dppo": _NONE._replace(dppo=("tv", 0.2, 0.2)),
    "prime_rl:ipo": _NONE._replace(dppo=("tv", 0.1, 0.1), two_sided=True),
    "areal:m2po": _NONE._replace(m2_threshold=0.04),
}


def choice(argument: str, value: Any, known: Mapping[Any, T]) -> T:
    if not isinstance(value, (str, bool)) or value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(str, known))}, got {value!r}")
    return known[value]


def number(argument: str, value: float, low: float = -math.inf, *, above: bool = False) -> float:
    want = "finite" if low == -math.inf else "finite and > {:g}" if above else "finite and >= {:g}"
    return _validate.number(argument, value, low, above=above, want=want)


def numbers(c: RolloutCorrection | str | None, has_rollout: bool, has_staleness: bool) -> dict[str, Any]:
    """The fields of PolicyRule that ``c`` decides.  Raises ValueError for the first one that is off."""
    found = dict(_ABSENT)
    if c is None:
        return found
    c = choice("correction", c, CORRECTIONS) if isinstance(c, str) else c
    if not isinstance(c, RolloutCorrection):
        raise ValueError(f"correction must be a RolloutCorrection or a name, got {type(c).__name__}")
    if not has_rollout:
        raise ValueError("old_logprobs and rollout_logprobs must be given with correction, got None")
    choice("correction.level", c.level, dict.fromkeys(CORRECTION_LEVELS[1:]))
    choice("correction.mode", c.mode, dict.fromkeys((*CORRECTION_MODES, "reject")))
    choice("correction.denominator", c.denominator, dict.fromkeys(("keep", "shrink")))
    low = number("correction.low", c.low, 0.0)
    high = math.inf if _is_infinite(c.high) else number("correction.high", c.high, low)
    for name in ("normalize", "stale_only", "two_sided"):
        flag = getattr(c, name)
        if not isinstance(flag, bool):
            raise ValueError(f"correction.{name} must be True or False, got {flag!r}")
    if not isinstance(c.reject, (tuple, list)):
        raise ValueError(f"correction.reject must be a tuple of tuples, got {type(c.reject).__name__}")
    level, reject = c.level, list(c.reject)
    if c.mode == "reject":
        names = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
        if level in names:
            reject.append((names[level], low, high))
        level = "none"
    if c.veto is not None:
        reject.append(("seq_max_k1", number("correction.veto", c.veto, 0.0, above=True), math.inf))
    if level == "none":
        low, high = 0.0, math.inf
    found |= {
        "correction": CORRECTION_LEVELS.index(level),
        "verdict": CORRECTION_MODES.index("mask" if c.mode == "mask" else "truncate"),
        "shrink": c.denominator == "shrink",
        "normalize": bool(c.normalize),
        "stale_only": bool(c.stale_only),
        "weight_low": low,
        "weight_high": high,
        "log_weight_low": _log(low),
        "log_weight_high": _log(high),
    }
    for entry in reject:
        _reject(found, entry)
    if c.dppo is not None:
        if not isinstance(c.dppo, (tuple, list)) or len(c.dppo) != 3:
            raise ValueError(f"correction.dppo must be (divergence, low, high), got {c.dppo!r}")
        kind, below, above = c.dppo
        choice("correction.dppo[0]", kind, dict.fromkeys(DIVERGENCES[1:]))
        found["sign_mask"] = DIVERGENCES.index(kind)
        found["sign_low"] = -number("correction.dppo[1]", below, 0.0)
        found["sign_high"] = number("correction.dppo[2]", above, 0.0)
        found["two_sided"] = bool(c.two_sided)
    if c.two_sided and c.dppo is None:
        raise ValueError("correction.dppo must be given with correction.two_sided, got None")
    if c.tv_threshold is not None:
        found["tv_high"] = number("correction.tv_threshold", c.tv_threshold, 0.0)
    if c.m2_threshold is not None:
        number("correction.m2_threshold", c.m2_threshold, 0.0, above=True)
    if c.off_policy_threshold is not None:
        found["off_policy_high"] = number("correction.off_policy_threshold", c.off_policy_threshold)
    decay = number("correction.staleness_decay", c.staleness_decay, 0.0, above=True)
    found["log_decay"] = math.log(decay)
    if c.max_staleness is not None:
        found["max_staleness"] = number("correction.max_staleness", c.max_staleness, 0.0)
    if not has_staleness and (decay != 1 or c.stale_only or c.max_staleness is not None):
        wanted = "max_staleness, staleness_decay or stale_only"
        raise ValueError(f"staleness must be given with correction's {wanted}, got None")
    return found


_ABSENT = {
    "correction": 0, "verdict": 0, "shrink": False, "normalize": False, "stale_only": False, "sign_mask": 0,
    "two_sided": False, "tv_high": math.inf,
    "weight_low": 0.0, "weight_high": math.inf, "log_weight_low": -math.inf, "log_weight_high": math.inf,
    "token_low": -math.inf, "token_high": math.inf, "extreme_low": -math.inf, "extreme_high": math.inf,
    "sum_k1_low": -math.inf, "sum_k1_high": math.inf, "mean_k1_low": -math.inf, "mean_k1_high": math.inf,
    "sum_k2_high": math.inf, "mean_k2_high": math.inf, "sum_k3_high": math.inf, "mean_k3_high": math.inf,
    "off_policy_high": math.inf, "sign_low": -math.inf, "sign_high": math.inf, "max_staleness": math.inf,
    "log_decay": 0.0,
}  # fmt: skip


def _log(ratio: float) -> float:
    return -math.inf if ratio == 0 else math.inf if ratio == math.inf else math.log(ratio)


def _k2_interval(high: float) -> Bounds:
    return -math.sqrt(2 * high), math.sqrt(2 * high)


def _k3_interval(high: float) -> Bounds:
    """The d between which exp(d) - 1 - d <= high, by Newton from outside, where it cannot overshoot."""
    above = min(math.sqrt(2 * high), math.log1p(high + math.sqrt(2 * high)))
    ends = []
    for d in (-1 - high, above):
        for _ in range(40 if high else 0):
            slope = math.expm1(d)
            d -= (slope - d - high) / slope
        ends.append(d if high else 0.0)
    return ends[0], ends[1]


_INTERVALS: dict[str, Callable[[float], Bounds]] = {"k2": _k2_interval, "k3": _k3_interval}
# where a statistic's bounds are: of one d, a prefix of fields; of sums, the fields themselves
_OF_ONE = {"token": "token", "seq_max": "extreme"}
_OF_MANY = {"seq_sum": "sum", "seq_mean": "mean"}
REJECTIONS = tuple(f"{place}_{k}" for place in (*_OF_ONE, *_OF_MANY) for k in ("k1", "k2", "k3"))


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and value == math.inf


def _reject(found: dict[str, Any], entry: tuple[Any, ...]) -> None:
    """Tighten the bounds by one entry of ``reject``: of single tokens, every k bounds d from both sides."""
    if not isinstance(entry, (tuple, list)) or not entry:
        raise ValueError(f"correction.reject must hold tuples (name, ...), got {entry!r}")
    name: Any = entry[0]
    choice("correction.reject[...][0]", name, dict.fromkeys(REJECTIONS))
    place, _, k = name.rpartition("_")
    want = 3 if k == "k1" else 2
    if len(entry) != want:
        form = "(name, low, high)" if k == "k1" else "(name, high)"
        raise ValueError(f"correction.reject of {name} must be {form}, got {entry!r}")
    label = f"correction.reject of {name}: its"
    endless = _is_infinite(entry[-1]) and k == "k1"
    high = math.inf if endless else number(f"{label} bound", entry[-1], 0.0)
    if k == "k1":
        bounds = _log(number(f"{label} lower bound", entry[1], 0.0)), _log(high)
        if not bounds[0] <= bounds[1]:
            raise ValueError(f"{label} bounds must be low <= high, got {entry!r}")
    elif place in _OF_ONE:
        bounds = _INTERVALS[k](high)
    else:
        bounds = -math.inf, high
    field = _OF_ONE[place] if place in _OF_ONE else f"{_OF_MANY[place]}_{k}"
    if bounds[0] > -math.inf:
        found[f"{field}_low"] = max(found[f"{field}_low"], bounds[0])
    found[f"{field}_high"] = min(found[f"{field}_high"], bounds[1])


def within_second_moment(call: PolicyLossCall, correction: RolloutCorrection | str) -> PolicyLossCall:
    """The call without the tokens that ``m2_threshold`` takes out of its mask; where two are alike, the first
    one goes."""
    c = CORRECTIONS[correction] if isinstance(correction, str) else correction
    if c.m2_threshold is None:
        return call
    assert call.old_logprobs is not None and call.rollout_logprobs is not None
    mask, d = call.mask, (call.old_logprobs - call.rollout_logprobs).double()
    counts = mask.reshape(-1)
    # what the engine did not score has moved by nothing; what the mask hides comes last
    square = torch.where(mask & d.isfinite(), d * d, 0).reshape(-1)
    ranked, order = torch.where(counts, square, -1).sort(descending=True, stable=True)
    left = counts.sum() - torch.arange(len(order), device=mask.device)
    with invariance.own_figures():
        sums = ranked.clamp(min=0).flip(0).cumsum(0).flip(0)
    mean = sums / left.clamp(min=1)
    dropped = ((mean >= c.m2_threshold) & (left > 1)).sum()
    rank = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=mask.device))
    return call._replace(mask=mask & (rank >= dropped).view(mask.shape))
