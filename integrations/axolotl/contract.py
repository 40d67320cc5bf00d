"""What rlkernel takes axolotl to be: its version, its functions and how they are called."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from rlkernel.integrations import _contract

SUPPORTED = ">=0.19,<0.20"  # 0.19.0 has been run

ASYNCHRONOUS = "axolotl.core.trainers.grpo.async_trainer"
TRAINER = "AsyncGRPOTrainer"
SCORES = "_get_per_token_logps_and_entropies"
FLAT_SCORES = "_get_per_token_logps_and_entropies_flattened"
FLAT_LOGPROBS = "_get_per_token_logps_flattened"

_SAMPLES = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size=None")
PARAMETERS = {
    SCORES: (
        *_SAMPLES, "compute_entropy=False", "pixel_values=None", "image_grid_thw=None", "num_images=None",
        "pixel_attention_mask=None", "image_sizes=None", "token_type_ids=None", "mm_token_type_ids=None",
    ),
    FLAT_SCORES: (*_SAMPLES, "prompt_mask=None", "compute_entropy=True"),
    FLAT_LOGPROBS: (*_SAMPLES, "prompt_mask=None"),
}  # fmt: skip


def asynchronous(strict: bool) -> ModuleType:
    """The module of axolotl's asynchronous GRPO.  Takes seconds.

    Raises:
        ImportError: axolotl is not installed. PatchError: its version is one that has not been run.
    """
    advice = "; patch_axolotl(strict=False) compares what is replaced instead"
    _contract.installed("axolotl", SUPPORTED, strict, advice)
    return importlib.import_module(ASYNCHRONOUS)


def checked(trainer: type, name: str) -> Any:
    """axolotl's method ``trainer.name``, which must take its ``PARAMETERS`` with these defaults."""
    return _contract.checked(trainer, name, PARAMETERS[name], "axolotl", SUPPORTED)
