"""What rlkernel takes AReaL to be: its version, its functions and how they are called."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

SUPPORTED = ">=1.0.4,<1.1"  # 1.0.4 has been run

HOMES = {  # of each part, the module that it replaces something in
    "logprobs": "areal.utils.functional.vocab_parallel",
    "fused_head": "areal.engine.fsdp_engine",
    "advantages": "areal.trainer.ppo.actor",
}

_GATHERED = ("logits", "labels", "temperature=1.0", "tp_group=None", "chunk_size=1024")
_LOSS = ("self", "input_", "loss_fn", "loss_weight_fn")
_OF_LOGITS = ("self", "logits", "inputs", "ulysses_pad_size=0")

PARAMETERS = {
    # areal.utils.functional.vocab_parallel
    "gather_logprobs": _GATHERED,
    "gather_logprobs_entropy": _GATHERED,
    # areal.engine.fsdp_engine
    "FSDPEngine.train_batch": _LOSS,
    "FSDPEngine.eval_batch": _LOSS,
    "FSDPEngine.forward_batch": (
        "self", "input_", "output_seqlens=None", f"aggregate_fn={torch.cat!r}",
    ),
    "FSDPEngine.forward_backward_batch": ("self", "mb_list", "process_output_fn", "forward_only=False"),
    "FSDPEngine._prepare_mb_inputs": ("self", "mb_item"),
    "FSDPEngine._compute_logprobs": _OF_LOGITS,
    "FSDPEngine._compute_logprobs_entropy": _OF_LOGITS,
    "FSDPEngine._get_vocab_min_max_logits": ("self", "logits", "ulysses_pad_size=0"),
    # areal.trainer.ppo.actor
    "PPOActor._compute_advantages": ("self", "data"),
}  # fmt: skip

# SHA-256 of the text of a method of which one half runs as it is and the other not at all
TEXTS = {"_compute_advantages": "82931883b0c2c4318b114cafd8e61989e974191f003996e224939c4ebfd62ba9"}

_CONTRACT = _contract.Contract("AReaL", SUPPORTED, PARAMETERS)
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked


def checked_text(owner: Any, name: str) -> Any:
    """The same of a method whose text matters, not its parameters alone."""
    original = checked(owner, name)
    try:
        text = inspect.getsource(original)
    except OSError as error:
        raise PatchError(f"{owner.__name__}.{name} must have a text that can be read") from error
    if hashlib.sha256(text.encode()).hexdigest() != TEXTS[name]:
        raise PatchError(f"{owner.__name__}.{name} must have the text of AReaL {SUPPORTED}, got another")
    return original
