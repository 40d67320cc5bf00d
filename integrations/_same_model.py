"""Whether an engine has made the model that transformers makes of the same configuration.

Engines pass over settings that few checkpoints have, such as biases of a layer whose other checkpoints have
none, or make a head of their own where it is tied: what was loaded is then another model, without an error.
"""

from __future__ import annotations

from typing import Any

import torch


def check_parameters(model: Any, config: Any, engine: str) -> None:
    """Raises ValueError where the engine's model has not as many parameters as that of transformers."""
    if (found := _count(model)) != (wanted := _count(_of_transformers(config))):
        raise ValueError(
            f"batch_invariant must have the model that transformers makes, of {wanted:,} parameters, got "
            f"{found:,}: {engine} passes over a setting of {type(config).__name__}"
        )


def _of_transformers(config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _count(model: Any) -> int:
    """Shared ones once, and of a vocabulary that an engine has padded what was there before."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts.setdefault(id(parameter), parameter.numel())
            if rows := getattr(module, "org_vocab_size", None):
                counts[id(parameter)] = rows * (parameter.numel() // len(parameter))
    return sum(counts.values())
