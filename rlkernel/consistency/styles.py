"""Other frameworks' metrics of the drift between rollout and trainer: their names, by their formulas."""

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rlkernel.consistency.statistics import CLAMP, Sequences, Tokens
from rlkernel.ops import _validate

_TINY = 1e-8  # what verl and NeMo-RL add to a denominator


class Measured(Protocol):
    """What a style reads of a report."""

    @property
    def token_statistics(self) -> Tokens: ...
    @property
    def sequence_statistics(self) -> Sequences: ...
    @property
    def bounds(self) -> tuple[float | None, float | None] | None: ...
    @property
    def has_advantages(self) -> bool: ...
    @property
    def invalid(self) -> int: ...
    @property
    def elements(self) -> int: ...


def metrics(report: Measured, style: str, options: dict[str, Any]) -> dict[str, float]:
    function = STYLES[_validate.choice("style", style, STYLES)]
    known = [x for x in inspect.signature(function).parameters if x != "report"]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"options of style {style!r} must be among {', '.join(known) or 'none'}, got {unknown[0]}"
        )
    return function(report, **options)


def verl(report: Measured, rollout_is: str | None = None) -> dict[str, float]:
    """``rollout_corr/*`` of rollout_corr_helper.py and ``training/*`` of debug/metrics.py.

    With ``rollout_is`` "token" or "sequence" also those of the weights, truncated at ``bounds[1]``, or
    IcePop's where ``bounds[0]`` is given.  Without a token only that verl calls its figures invalid.
    """
    t, s = report.token_statistics, report.sequence_statistics
    if not t.n:
        return {"training/rollout_probs_diff_valid": 0.0}
    counts = s.counts.double() + _TINY
    train, rollout = s.total("train") / counts, s.total("rollout") / counts
    difference = rollout - train
    found = {
        "training_ppl": float((-train).exp().mean()),
        "training_log_ppl": float(-train.mean()),
        "kl": _mean(t, "delta", -1.0),
        "k3_kl": _mean(t, "k3"),
        "rollout_ppl": float((-rollout).exp().mean()),
        "rollout_log_ppl": float(-rollout.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": (t.total("bounded_chi2") + t.n) / (t.n + _TINY) - 1,
        "chi2_seq": float((2 * s.total("delta").clamp(-CLAMP, CLAMP)).exp().mean()) - 1,
    }
    if rollout_is is not None:
        _validate.choice("rollout_is", rollout_is, ("token", "sequence"))
        found |= _verl_weights(report, rollout_is == "sequence")
    return {f"rollout_corr/{name}": value for name, value in found.items()} | {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": t.maximum("p_abs"),
        "training/rollout_probs_diff_mean": t.mean("p_abs"),
        "training/rollout_probs_diff_std": math.sqrt(t.variance("p_abs")),
        "training/rollout_actor_probs_pearson_corr": t.correlation(),
    }


def _verl_weights(report: Measured, of_sequences: bool) -> dict[str, float]:
    low, high = _needed("rollout_is", report)
    if math.isinf(high):
        raise ValueError("bounds[1] must be a number for verl's rollout_is, got None")
    t, s = report.token_statistics, report.sequence_statistics
    counts, icepop = s.counts.double(), bool(low)
    least = low if icepop else 1 / high
    if of_sequences:
        logs = s.total("delta")
        raw = logs.clamp(-CLAMP, CLAMP).exp()
        applied = torch.where((raw >= low) & (raw <= high), raw, 0.0) if icepop else raw.clamp(max=high)
        weighted = counts * applied
        mean = float(weighted.sum()) / (t.n + _TINY)
        square = float((weighted * applied).sum()) / (t.n + _TINY)
        found = {
            "rollout_is_max": float(logs.max().clamp(max=CLAMP).exp()),
            "rollout_is_min": float(logs.min().exp()),
            "rollout_is_mean": mean,
            "rollout_is_ratio_fraction_high": float((logs > math.log(high)).double().mean()),
            "rollout_is_ratio_fraction_low": float((logs < math.log(least)).double().mean()),
        }
        of_each, raw_of_each = weighted / (counts + _TINY), counts * raw / (counts + _TINY)
        outside = float((counts * ((raw < low) | (raw > high))).sum()) / (t.n + _TINY)
    else:
        row = "bounded_inside" if icepop else "truncated"
        mean = _mean(t, row)
        square = t.squares(row) / (t.n + _TINY)
        found = {
            "rollout_is_mean": mean,
            "rollout_is_ratio_fraction_high": _mean(t, "over"),
            "rollout_is_ratio_fraction_low": _mean(t, "under" if icepop else "under_reciprocal"),
            "rollout_is_max": t.maximum(row),
            "rollout_is_min": t.minimum(row),
        }
        of_each, raw_of_each = (s.total(x) / (counts + _TINY) for x in (row, "bounded"))
        outside = (t.total("under") + t.total("over")) / (t.n + _TINY)
    found |= {
        "rollout_is_std": math.sqrt(max(square - mean**2, 0.0)) if t.n > 1 else 0.0,
        "rollout_is_eff_sample_size": (mean + _TINY) ** 2 / square if square else math.inf,
        "rollout_is_seq_mean": float(of_each.mean()),
        "rollout_is_seq_std": float(of_each.std()) if len(of_each) > 1 else 0.0,
        "rollout_is_seq_max": float(of_each.max()),
        "rollout_is_seq_min": float(of_each.min()),
        "rollout_is_seq_max_deviation": float((of_each - 1).abs().max()),
        "rollout_is_seq_fraction_high": float((raw_of_each > high).double().mean()),
        "rollout_is_seq_fraction_low": float((raw_of_each < least).double().mean()),
    }
    return found | ({"rollout_is_oob_ratio": outside} if icepop else {})


def trl(report: Measured, mode: str = "sequence_mask") -> dict[str, float]:
    """``sampling/*`` of GRPOTrainer, ``mode`` being its vllm_importance_sampling_mode.

    Its bounds are the report's; without them those of TRL's defaults, None and 3, in the modes of sequences.
    As there, a token that is NaN has the ratio 1, and figures of nothing are 0.
    """
    modes = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
    _validate.choice("mode", mode, modes)
    t, s = report.token_statistics, report.sequence_statistics
    found = {
        "sampling/sampling_logp_difference/mean": t.mean("abs") if t.n else 0.0,
        "sampling/sampling_logp_difference/max": t.maximum("abs") if t.n else 0.0,
    }
    name = "sampling/importance_sampling_ratio"
    if mode.startswith("sequence"):
        low, high = _limits(report.bounds if report.bounds is not None else (None, 3.0))
        ratios = s.total("delta").exp()
        if mode == "sequence_truncate":
            ratios = ratios.clamp(low, high)
        else:
            ratios = torch.where((ratios < low) | (ratios > high), 0.0, ratios)
        least, mean, most = _extent(ratios)
    else:
        _needed(f"mode {mode!r}", report)
        row = "clamped" if mode == "token_truncate" else "inside"
        n = t.n + report.invalid
        mean = (t.total(row) + report.invalid) / n if n else 0.0
        least, most = (t.minimum(row), t.maximum(row)) if t.n else (mean, mean)
        if report.invalid:
            least, most = min(least, 1.0), max(most, 1.0)
    return found | {f"{name}/min": least, f"{name}/mean": mean, f"{name}/max": most}


def skyrl(report: Measured) -> dict[str, float]:
    """``policy/rollout_train_logprobs_abs_diff_*`` of RayPPOTrainer, which logs none without a token; with
    bounds also ``policy/loss_metrics/*`` of its off-policy correction, bounds[1] being the caps."""
    t, s = report.token_statistics, report.sequence_statistics
    if not t.n:
        return {}
    name = "policy/rollout_train_logprobs_abs_diff"
    found = {
        f"{name}_max": t.maximum("abs"),
        f"{name}_min": t.minimum("abs"),
        f"{name}_mean": t.mean("abs"),
        f"{name}_std": math.sqrt(t.variance("abs")),
    }
    if report.bounds is None:
        return found
    _, high = _limits(report.bounds)
    n = report.elements
    padded = n > t.n  # with zeros, as the mask multiplies the ratios
    spread = t.squares("bounded") - t.total("bounded") ** 2 / n
    sequences = s.total("delta").clamp(-CLAMP, CLAMP).exp()
    corrected = {
        "is_ratio_mean": t.mean("bounded"),
        "is_ratio_std": math.sqrt(max(spread, 0.0) / (n - 1)) if n > 1 else math.nan,
        "is_ratio_max": t.maximum("bounded"),
        "is_ratio_min": 0.0 if padded else t.minimum("bounded"),
        "tis_token_clip_high_ratio": t.mean("over"),
        "tis_seq_clip_high_ratio": float((sequences > high).double().mean()),
    }
    return found | {f"policy/loss_metrics/{key}": value for key, value in corrected.items()}


def nemo(report: Measured, kl_type: str = "k3", truncation: str = "tis") -> dict[str, float]:
    """Of NeMo-RL's ClippedPGLossFn; ``kl_type`` is its reference_policy_kl_type.

    With bounds the weights are those of its truncated_importance_sampling_type, ``truncation``: "tis",
    "icepop" or "seq-mask-tis", and ``is_oob_ratio`` tells how many are outside.
    """
    _validate.choice("kl_type", kl_type, ("k1", "k2", "k3"))
    _validate.choice("truncation", truncation, ("tis", "icepop", "seq-mask-tis"))
    t = report.token_statistics
    forward, backward = {
        "k1": (_mean(t, "delta", -1.0), _mean(t, "delta")),
        "k2": (_mean(t, "square", 0.5),) * 2,
        "k3": (_mean(t, "k3"), _mean(t, "k3_of_minus")),
    }[kl_type]
    found = {
        "token_mult_prob_error": _mean(t, "exp_abs"),
        "gen_kl_error": forward,
        "policy_kl_error": backward,
        "js_divergence_error": _mean(t, "jensen"),
        "sampling_importance_ratio": _mean(t, "ratio"),
    }
    if report.bounds is None:
        return found
    if truncation != "seq-mask-tis":
        found["sampling_importance_ratio"] = _mean(t, "clamped" if truncation == "tis" else "inside")
        return found | {"is_oob_ratio": (t.total("under") + t.total("over")) / (t.n + _TINY)}
    s, (low, high) = report.sequence_statistics, _limits(report.bounds)
    here, counts = s.counts > 0, s.counts.double()
    geometric = (s.total("delta") / (counts + _TINY)).exp()
    kept = (geometric >= low) & (geometric <= high)
    found["sampling_importance_ratio"] = float((s.total("ratio") * kept).sum()) / (t.n + _TINY)
    return found | {"is_oob_ratio": float((here & ~kept).sum()) / (float(here.sum()) + _TINY)}


def prime(report: Measured) -> dict[str, float]:
    """``mismatch_kl/all/*`` that prime-rl logs, and with advantages those of its default loss, whose
    dppo_mask_low and dppo_mask_high are 0.2, over the sequences."""
    t, s = report.token_statistics, report.sequence_statistics
    found = {
        "mismatch_kl/all/mean": t.mean("k3"),
        "mismatch_kl/all/std": math.sqrt(t.variance("k3")),
        "mismatch_kl/all/max": t.maximum("k3"),
    }
    if not report.has_advantages:
        return found
    moved = s.total("moved")
    of_each = {
        "masked_mismatch_kl": s.total("moved_k3") / moved.clamp(min=1),
        "unmasked_mismatch_kl": (s.total("k3") - s.total("moved_k3")) / (s.counts - moved).clamp(min=1),
        "is_masked": moved / s.counts.clamp(min=1),
        "is_masked_low": s.total("moved_low") / s.counts.clamp(min=1),
        "is_masked_high": s.total("moved_high") / s.counts.clamp(min=1),
    }
    for name, values in of_each.items():
        _, mean, most = _extent(values, math.nan)
        found |= {f"{name}/mean": mean, f"{name}/max": most}
    return found


def slime(report: Measured, per_token: bool = False) -> dict[str, float]:
    """``train/*`` of slime's policy loss: the mean over sequences of each one's mean, empty ones counting 0,
    or over tokens with ``per_token``, its calculate_per_token_loss.  With bounds also those of --use-tis,
    its --tis-clip-low and --tis-clip.
    """
    t, s = report.token_statistics, report.sequence_statistics

    def mean(row: str) -> float:
        if per_token:
            return t.total(row) / max(t.n, 1)
        return _extent(s.total(row) / s.counts.clamp(min=1))[1]

    found = {"train/train_rollout_logprob_abs_diff": mean("abs")}
    if report.bounds is not None:
        found |= {
            "train/tis": mean("ratio"),
            "train/tis_clipfrac": mean("under") + mean("over"),
            "train/tis_abs": mean("ratio_off"),
        }
    return found


STYLES: dict[str, Callable[..., dict[str, float]]] = {
    "verl": verl,
    "trl": trl,
    "skyrl": skyrl,
    "nemo": nemo,
    "prime": prime,
    "slime": slime,
}


def _mean(t: Tokens, row: str, factor: float = 1.0) -> float:
    return factor * t.total(row) / (t.n + _TINY)


def _limits(bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = bounds
    return 0.0 if low is None else low, math.inf if high is None else high


def _needed(what: str, report: Measured) -> tuple[float, float]:
    if report.bounds is None:
        raise ValueError(f"bounds must be given to compare for {what}, got None")
    return _limits(report.bounds)


def _extent(x: Tensor, empty: float = 0.0) -> tuple[float, float, float]:
    """Least, mean, largest."""
    if not len(x):
        return empty, empty, empty
    return float(x.min()), float(x.mean()), float(x.max())
