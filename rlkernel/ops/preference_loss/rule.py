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
def build(*, has_reference: bool = False, **options: Any) -> PreferenceRule:
    """``options`` are the keywords of ``preference_loss``; of those that are tensors it needs none.  Raises
    ValueError for the first that is off."""

    def number(name: str, low: float = -math.inf, *, above: bool = False) -> float:
        return _validate.number(name, options[name], low, above=above)

    def count(name: str) -> float:
        return 0.0 if options[name] is None else number(name, 0.0, above=True)

    loss_type = options["loss_type"]
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
    divergence = _validate.choice("f_divergence_type", options["f_divergence_type"], PREFERENCE_DIVERGENCES)
    exponent = number("f_alpha_divergence_coef") - 1
    for name in names:
        if divergence != "reverse_kl" and name not in DIFFERENCES:
            want = f"'reverse_kl' with loss_type {name!r}"
            raise ValueError(f"f_divergence_type must be {want}, got {divergence!r}")
        if options["use_weighting"] and (name in SORTED or name in UNPAIRED):
            raise ValueError(f"use_weighting must be False with loss_type {name!r}, got True")
    if divergence == "alpha_divergence" and abs(exponent) < 1e-6:  # the limit is the logarithm
        divergence = "reverse_kl"
    ld_alpha = options["ld_alpha"]
    if ld_alpha is not None and unpaired:
        raise ValueError(f"ld_alpha must be None with loss_type {unpaired[0]!r}, got {ld_alpha}")
    contrasts = [name for name in names if name != "sft"]
    likely = 1.0 if any(name in WITH_NLL for name in names) else 0.0
    return PreferenceRule(
        terms=tuple(PREFERENCE_TERMS.index(TERMS[name]) for name in names),
        weights=_weights(options["loss_weights"], names),
        smoothing=_smoothing(options["label_smoothing"], names),
        paired=not unpaired,
        per_token=bool(contrasts) and all(name in PER_TOKEN for name in contrasts),
        divergence=PREFERENCE_DIVERGENCES.index(divergence),
        weighting=bool(options["use_weighting"]),
        beta=number("beta", 0.0, above=True),
        gamma=number("gamma"),
        discopop_tau=number("discopop_tau", 0.0, above=True),
        exponent=exponent,
        ld_alpha=1.0 if ld_alpha is None else _validate.fraction("ld_alpha", ld_alpha),
        nll_coef=likely if options["nll_coef"] is None else number("nll_coef", 0.0),
        desirable_weight=number("desirable_weight", 0.0),
        undesirable_weight=number("undesirable_weight", 0.0),
        factor=number("dp_size", 0.0, above=True),
        items=count("num_items_in_batch"),
        nll_items=count("num_tokens_in_batch"),
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
    return tuple(_validate.number("loss_weights", value) for value in values)


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
