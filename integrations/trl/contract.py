"""What rlkernel takes TRL's functions to be: their names and how they are called."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

SUPPORTED = ">=1.15,<1.17"  # the versions that have been run

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # what its functions are replaced for

HEAD = "_ChunkedLogProbFunction"
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # after the logprobs, in this order
METHOD = "_get_per_token_logps_and_entropies"
SHUFFLE = "shuffle_sequence_dict"
STEP = "training_step"
EXTRACT = "extract_logprobs"  # of vLLM's outputs
GENERATE = "_generate_and_score_completions"
BEGIN, TRAIN = "__init__", "train"  # of the class that all trainers inherit
UNWRAP = "unwrap_model_for_generation"
ENGINE, SYNC = "_init_vllm", "sync_weights"  # of what talks to vLLM
PARAMETERS = {
    HEAD: (
        "hidden", "weight", "bias", "targets", "temperature", "chunk_size",
        "final_logit_softcapping=None", "logit_scale=1.0", f"outputs={OUTPUTS!r}",
    ),
    "selective_log_softmax": ("logits", "index", "temperature=1.0", "row_mask=None"),
    "entropy_from_logits": ("logits", "chunk_size=128"),
    "selective_log_softmax_and_entropy": (
        "logits", "index", "entropy_requires_grad=True", "temperature=1.0", "row_mask=None",
    ),
    METHOD: (
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size=None",
        "compute_entropy=False", "compute_aux_loss=False", "pixel_values=None", "image_grid_thw=None",
        "num_images=None", "pixel_attention_mask=None", "spatial_shapes=None", "num_tiles=None",
        "image_sizes=None", "token_type_ids=None", "mm_token_type_ids=None", "image_position_ids=None",
    ),
    SHUFFLE: ("seq_dict",),
    STEP: ("self", "model", "inputs", "num_items_in_batch"),
    EXTRACT: ("all_outputs",),
    GENERATE: ("self", "inputs"),
    BEGIN: ("self", "*args", "**kwargs"),
    UNWRAP: (
        "model", "accelerator", "gather_deepspeed3_params=True", "generation_kwargs=None",
        "gradient_checkpointing_kwargs=None",
    ),
    ENGINE: ("self",),
    SYNC: ("self",),
}  # fmt: skip


def supported_utils(strict: bool) -> ModuleType:
    """``trl.trainer.utils``, of a version that has been run if ``strict``.

    Raises:
        ImportError: TRL is not installed. PatchError: its version is another one, or lacks what is called.
    """
    advice = "; patch_trl(strict=False) compares what is replaced instead"
    _contract.installed("TRL", SUPPORTED, strict, advice)
    import trl.trainer.utils as utils

    if not callable(vars(utils).get("maybe_gather_lm_head_ctx")):
        raise PatchError("trl.trainer.utils.maybe_gather_lm_head_ctx must be callable, got nothing that is")
    return utils


def trainer_base() -> type:
    """The class that all trainers inherit.  Importing it imports no vLLM, as the modules of trainers do.

    Raises:
        PatchError: this TRL has none.
    """
    try:
        from trl.trainer.base_trainer import _BaseTrainer
    except ImportError as error:
        raise PatchError(f"trl.trainer.base_trainer._BaseTrainer must be a class, got {error}") from error
    return _BaseTrainer


def trainers() -> tuple[type, ...]:
    """The trainers that score the samples of groups in ``METHOD``.  Takes seconds."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return GRPOTrainer, RLOOTrainer


def checked(owner: Any, name: str) -> Any:
    """TRL's function ``owner.name``, which must take its ``PARAMETERS`` with these defaults."""
    return _contract.checked(owner, name, PARAMETERS[name], "TRL", SUPPORTED)
