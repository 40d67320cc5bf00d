"""What rlkernel takes Megatron-Core to be: its version, its functions and how they are called."""

from __future__ import annotations

import contextlib
from typing import Any

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

SUPPORTED = ">=0.14,<0.17"  # 0.14.0, 0.15.3 and 0.16.1 have been run
DISTRIBUTION = "megatron-core"


_MAMBA = (
    "self", "input_ids", "position_ids", "attention_mask", "decoder_input=None", "labels=None",
    "inference_context=None", "runtime_gather_output=None", "inference_params=None",
)  # fmt: skip

PARAMETERS = {
    # megatron.core.fusions.fused_cross_entropy
    "fused_vocab_parallel_cross_entropy": ("vocab_parallel_logits", "target", "tp_group"),
    # megatron.core.tensor_parallel.cross_entropy
    "vocab_parallel_cross_entropy": ("vocab_parallel_logits", "target", "label_smoothing=0.0"),
    "LanguageModule.compute_language_model_loss": ("self", "labels", "logits"),
    "GPTModel._postprocess": (
        "self", "hidden_states", "input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos",
        "rotary_pos_sin", "mtp_in_postprocess=None", "loss_mask=None", "decoder_input=None",
        "attention_mask=None", "inference_params=None", "packed_seq_params=None", "sequence_len_offset=None",
        "runtime_gather_output=None", "extra_block_kwargs=None", "inference_context=None",
    ),
    "MambaModel.forward": (*_MAMBA, "packed_seq_params=None", "padding_mask=None"),
    "ColumnParallelLinear.forward": ("self", "input_", "weight=None", "runtime_gather_output=None"),
}  # fmt: skip
EARLIER = {"MambaModel.forward": _MAMBA}  # before 0.16


_CONTRACT = _contract.Contract("Megatron", SUPPORTED, PARAMETERS, "megatron.core", DISTRIBUTION)
require_version = _CONTRACT.require_version


def checked(owner: Any, name: str) -> Any:
    """Megatron's own function ``owner.name``, which must take its ``PARAMETERS`` with these defaults."""
    path = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
    if path in EARLIER:
        with contextlib.suppress(PatchError):
            return _contract.own(owner, name, EARLIER[path], "Megatron", SUPPORTED)
    return _CONTRACT.checked(owner, name)
