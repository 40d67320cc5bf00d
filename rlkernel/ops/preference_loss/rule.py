"""From the arguments of ``preference_loss`` to the numbers that a kernel takes: the home of all names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlkernel.calls.preference_loss import (
    PREFERENCE_DIVERGENCES,
    PREFERENCE_TERMS,
    SORTED,
    PreferenceRule,
)
from rlkernel.ops import _validate
from rlkernel.runtime.memo import remembered

# cpo is the sigmoid without a reference; its definition adds the likelihood of the chosen
TERMS = {**{name: name for name in PREFERENCE_TERMS}, "cpo": "sigmoid"}
UNPAIRED = ("kto", "apo_zero_unpaired")
REFERENCE_FREE = ("orpo", "simpo", "cpo", "sft")
PER_TOKEN = ("orpo", "simpo")
WITH_NLL = ("orpo", "cpo")
SMOOTHED = ("sigmoid", "cpo", "sigmoid_norm", "simpo", "aot", "aot_unpaired", "robust", "exo_pair")
# those whose loss is of the difference of two scores, which an f-divergence replaces
DIFFERENCES = (
    "sigmoid", "cpo", "sigmoid_norm", "hinge", "ipo", "ipo_sum", "exo_pair", "robust", "discopop", "simpo",
    "sft",
)  # fmt: skip
MAX_TERMS = 16

# What each paper publishes; ``preference_loss(..., **preset)``.
PRESETS: Mapping[str, dict[str, Any]] = {
    "dpo": {"loss_type": "sigmoid", "beta": 0.1},
    "cdpo": {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.1},
    "rdpo": {"loss_type": "robust", "beta": 0.1, "label_smoothing": 0.1},
    "slic": {"loss_type": "hinge", "beta": 0.1},
    "ipo": {"loss_type": "ipo", "beta": 0.1},
    "exo": {"loss_type": "exo_pair", "beta": 0.1, "label_smoothing": 1e-3},
    "nca": {"loss_type": "nca_pair", "beta": 0.01},
    "mpo": {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0), "beta": 0.1},
    "ld_dpo": {"loss_type": "sigmoid", "beta": 0.1, "ld_alpha": 0.5},
    "cpo": {"loss_type": "cpo", "beta": 0.1},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "gamma": 1.0},
    "cpo_simpo": {"loss_type": "simpo", "beta": 2.0, "gamma": 1.0, "nll_coef": 1.0},
    "orpo": {"loss_type": "orpo", "beta": 0.1},
    "kto": {"loss_type": "kto", "beta": 0.1},
    "apo_zero": {"loss_type": "apo_zero", "beta": 0.1},
    "apo_down": {"loss_type": "apo_down", "beta": 0.1},
    "discopop": {"loss_type": "discopop", "beta": 0.05, "discopop_tau": 0.05},
}


@remembered
def build(
    *,
    loss_type: str | Sequence[str],
    loss_weights: Sequence[float] | None,
    beta: float,
    label_smoothing: float | Sequence[float],
    gamma: float,
    discopop_tau: float,
    f_divergence_type: str,
    f_alpha_divergence_coef: float,
    ld_alpha: float | None,
    use_weighting: bool,
    nll_coef: float | None,
    desirable_weight: float,
    undesirable_weight: float,
    num_items_in_batch: float | None,
    num_tokens_in_batch: float | None,
    dp_size: int,
    has_reference: bool,
) -> PreferenceRule:
    """Raises ValueError for the first argument that is off."""
    if not isinstance(loss_type, Sequence):
        raise ValueError(f"loss_type must be a name or a sequence of them, got {type(loss_type).__name__}")
    names = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    if not 1 <= len(names) <= MAX_TERMS:
        raise ValueError(f"loss_type must be a name or 1 to {MAX_TERMS} of them, got {len(names)}")
    for name in names:
        _validate.choice("loss_type", name, TERMS)
    unpaired = [name for name in names if name in UNPAIRED]
    if unpaired and len(unpaired) != len(names):
        paired = next(name for name in names if name not in UNPAIRED)
        raise ValueError(
            f"loss_type must be of pairs or of single sequences, got {paired!r} and {unpaired[0]!r}"
        )
    if has_reference and all(name in REFERENCE_FREE for name in names):
        raise ValueError(f"ref_logprobs must be None with loss_type {names[0]!r}, which has no reference")
    divergence = PREFERENCE_DIVERGENCES.index(
        _validate.choice("f_divergence_type", f_divergence_type, PREFERENCE_DIVERGENCES)
    )
    exponent = finite("f_alpha_divergence_coef", f_alpha_divergence_coef) - 1
    if f_divergence_type == "alpha_divergence" and abs(exponent) < 1e-6:  # the limit is the logarithm
        divergence = 0
    if f_divergence_type != "reverse_kl":
        for name in names:
            if name not in DIFFERENCES:
                want = f"'reverse_kl' with loss_type {name!r}"
                raise ValueError(f"f_divergence_type must be {want}, got {f_divergence_type!r}")
    if use_weighting:
        for name in names:
            if name in SORTED or name in UNPAIRED:
                raise ValueError(f"use_weighting must be False with loss_type {name!r}, got True")
    if ld_alpha is not None and unpaired:
        raise ValueError(f"ld_alpha must be None with loss_type {unpaired[0]!r}, got {ld_alpha}")
    contrasts = [name for name in names if name != "sft"]
    if nll_coef is None:
        nll_coef = 1.0 if any(name in WITH_NLL for name in names) else 0.0
    return PreferenceRule(
        terms=tuple(PREFERENCE_TERMS.index(TERMS[name]) for name in names),
        weights=_weights(loss_weights, names),
        smoothing=_smoothing(label_smoothing, names),
        paired=not unpaired,
        per_token=bool(contrasts) and all(name in PER_TOKEN for name in contrasts),
        divergence=divergence,
        weighting=bool(use_weighting),
        beta=_positive("beta", beta),
        gamma=finite("gamma", gamma),
        discopop_tau=_positive("discopop_tau", discopop_tau),
        exponent=exponent,
        ld_alpha=1.0 if ld_alpha is None else _validate.fraction("ld_alpha", ld_alpha),
        nll_coef=_validate.number("nll_coef", nll_coef, 0.0),
        desirable_weight=_validate.number("desirable_weight", desirable_weight, 0.0),
        undesirable_weight=_validate.number("undesirable_weight", undesirable_weight, 0.0),
        factor=_positive("dp_size", dp_size),
        items=0.0 if num_items_in_batch is None else _positive("num_items_in_batch", num_items_in_batch),
        nll_items=0.0
        if num_tokens_in_batch is None
        else _positive("num_tokens_in_batch", num_tokens_in_batch),
    )


def _weights(values: Sequence[float] | None, names: tuple[str, ...]) -> tuple[float, ...]:
    if values is None:
        return (1.0,) * len(names)
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"loss_weights must be a sequence of numbers, got {type(values).__name__}")
    if len(values) != len(names):
        raise ValueError(
            f"loss_weights must have one number for each of {len(names)} losses, got {len(values)}"
        )
    return tuple(finite("loss_weights", value) for value in values)


def _smoothing(value: float | Sequence[float], names: tuple[str, ...]) -> tuple[float, ...]:
    if isinstance(value, Sequence):
        if len(value) != len(names):
            raise ValueError(
                f"label_smoothing must be one number or one for each of {len(names)} losses, got {len(value)}"
            )
        each = tuple(value)
        wrong = [name for name, x in zip(names, each, strict=True) if x and name not in SMOOTHED]
    else:
        _validate.fraction("label_smoothing", value)
        each = tuple(value if name in SMOOTHED else 0.0 for name in names)
        wrong = list(names) if value and not any(name in SMOOTHED for name in names) else []
    if wrong:
        raise ValueError(f"label_smoothing must be 0 with loss_type {wrong[0]!r}, got {value}")
    for name, x in zip(names, each, strict=True):
        _validate.fraction("label_smoothing", x)
        if name == "robust" and not x < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5) with loss_type 'robust', got {x}")
        if name == "exo_pair" and not 0 < x < 1:
            raise ValueError(f"label_smoothing must be in (0, 1) with loss_type 'exo_pair', got {x}")
    return tuple(float(x) for x in each)


def finite(argument: str, value: float) -> float:
    if isinstance(value, (int, float)) and not math.isfinite(value):
        raise ValueError(f"{argument} must be finite, got {value}")
    return _validate.number(argument, value, -math.inf)


def _positive(argument: str, value: float) -> float:
    if finite(argument, value) <= 0:
        raise ValueError(f"{argument} must be > 0 and finite, got {value}")
    return float(value)
