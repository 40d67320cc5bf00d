"""Which models SWIFT's trainers call, and which of those calls cannot be told their labels."""

from __future__ import annotations

from typing import Any


def shared_out(trainer: Any) -> str | None:
    """Why the calls of a trainer's models are left to SWIFT."""
    if trainer.template.sequence_parallel_size > 1:
        return "sequence parallelism shares the rows of a sample out inside the model"
    if getattr(trainer, "is_encoder_decoder", False):
        return "the model is an encoder-decoder"
    return None


def with_policy(trainer: Any, model: Any) -> list[Any]:
    """The model, and before a reference its policy: rounding would tell one that is scored from one that is
    not."""
    return [trainer.model, model] if model is getattr(trainer, "ref_model", None) else [model]
