"""What rlkernel takes torchtitan to be: its version, and what its trainers call of a loss."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

FRAMEWORK = "torchtitan"
WHO = "rlkernel.integrations.torchtitan"
SUPPORTED = ">=0.3,<0.4"  # 0.3.0 has been run
WRAPPER = "ChunkedLossWrapper"
OPTIONS = ("num_chunks", "loss_fn")
# the losses that look at no row outside of their loss_mask
MASKED = ("torchtitan.experiments.rl.losses.grpo.GRPOLoss", "torchtitan.experiments.rl.losses.dapo.DAPOLoss")
CROSS_ENTROPY = "torchtitan.components.loss.CrossEntropyLoss"
PARAMETERS = {
    "__call__": ("self", "pred", "labels", "global_valid_tokens=None", "**loss_inputs"),
    "__init__": ("self", "config", "compile_config=None"),
    "set_lm_head": ("self", "lm_head"),
}


def losses() -> ModuleType:
    """The module of torchtitan's losses, whose chunked one must be what its trainers know.  Takes seconds.

    Raises:
        ImportError: torchtitan is not installed. PatchError: its wrapper is another one.
    """
    _contract.installed(FRAMEWORK, SUPPORTED, strict=False, who=WHO)
    import torchtitan.components.loss as found

    wrapper: Any = vars(found).get(WRAPPER)
    if wrapper is None:
        raise PatchError(f"{found.__name__} must have {WRAPPER}, as torchtitan {SUPPORTED} has")
    for name, parameters in PARAMETERS.items():
        _contract.checked(wrapper, name, parameters, FRAMEWORK, SUPPORTED)
    options = tuple(field.name for field in dataclasses.fields(wrapper.Config))
    if options != OPTIONS:
        raise PatchError(f"{WRAPPER}.Config must have {', '.join(OPTIONS)}, got {', '.join(options)}")
    return found


def class_name(loss: Any) -> str:
    return f"{type(loss).__module__}.{type(loss).__qualname__}"


def is_of_logits(config: Any) -> bool:
    """Whether it is of a loss of torchtitan's own that reads logits."""
    return class_name(config).removesuffix(".Config") in (*MASKED, CROSS_ENTROPY)
