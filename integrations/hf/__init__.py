"""Hugging Face transformers: one model serves packed batches, where a group's prompt runs once, and all else.

``register_hf()`` gives transformers an attention implementation. A call with the keyword argument
``prefix_batch`` runs ``prefix_shared_attention``; every other call runs what transformers would have chosen
for the model. So a model is put on it once and for all,

    rlkernel.register_hf()
    model.set_attn_implementation("rlkernel")

and not around a call: gradient checkpointing looks the implementation up again in backward, when the call is
long over. For the same reason the batch travels as an argument, which checkpointing keeps.
"""

from rlkernel.integrations.hf.attention import every_layer
from rlkernel.integrations.hf.logprobs import PackedLogprobs, packed_logprobs
from rlkernel.integrations.hf.models import causal_lm, check_model, family, is_sharded
from rlkernel.integrations.hf.registration import (
    SUPPORTED,
    is_registered,
    on_its_own,
    register_hf,
    use_packed,
)
from rlkernel.integrations.hf.verification import verify

__all__ = [
    "PackedLogprobs",
    "SUPPORTED",
    "causal_lm",
    "check_model",
    "every_layer",
    "family",
    "is_registered",
    "is_sharded",
    "on_its_own",
    "packed_logprobs",
    "register_hf",
    "use_packed",
    "verify",
]
