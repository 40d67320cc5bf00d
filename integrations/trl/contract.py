"""What rlkernel takes TRL's functions to be: their names and how they are called."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

SUPPORTED = ">=1.0,<1.17"  # the versions that have been run
FUSED = "1.15"  # since which all trainers score in one head, and make no logits

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # what its functions are replaced for

HEAD = "_ChunkedLogProbFunction"
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # after the logprobs, in this order
METHOD = "_get_per_token_logps_and_entropies"
FULL_LOGITS = "_full_logits_logps"  # TRL 1.14 has a second method, which METHOD calls for logits
LOSS, REFERENCE = "_compute_loss", "compute_ref_log_probs"  # of trainers of preferences
SHUFFLE = "shuffle_sequence_dict"
STEP = "training_step"
EXTRACT = "extract_logprobs"  # of vLLM's outputs
GENERATE = "_generate_and_score_completions"
BEGIN, TRAIN = "__init__", "train"  # of the class that all trainers inherit
UNWRAP = "unwrap_model_for_generation"
JSD = "generalized_jsd_loss"  # since TRL 1.9 as in PARAMETERS
GKD, GOLD = "trl.experimental.gkd.gkd_trainer", "trl.experimental.gold.gold_trainer"
KERNELS, DIVERGENCE = "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"  # since TRL 1.15
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
    JSD: (
        "student_logits", "teacher_logits", "labels=None", "beta=0.5", "temperature=1.0",
        "reduction='batchmean'", "num_items_in_batch=None",
    ),
    f"GOLDTrainer.{JSD}": (
        "student_logits", "teacher_logits", "labels=None", "beta=0.5", "temperature=1.0",
        "reduction='batchmean'", "logits_are_probs=False", "num_items_in_batch=None",
    ),
    DIVERGENCE: (
        "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight",
        "teacher_bias", "beta", "temperature=1.0", "student_logit_scale=1.0",
        "student_final_logit_softcapping=None", "teacher_logit_scale=1.0",
        "teacher_final_logit_softcapping=None",
    ),
    ENGINE: ("self",),
    SYNC: ("self",),
}  # fmt: skip
# what trainers of TRL before 1.15 have; METHOD and FULL_LOGITS take images besides, which differ
SCORING = PARAMETERS[METHOD][:7]
EARLIER: dict[str, tuple[tuple[str, ...], ...]] = {
    HEAD: (
        ("last_hidden", "weight", "targets", "temperature", "chunk_size", "logit_scale=1.0"),
        (
            "last_hidden", "weight", "targets", "temperature", "chunk_size", "final_logit_softcapping=None",
            "logit_scale=1.0",
        ),
        (
            "last_hidden", "weight", "bias", "targets", "temperature", "chunk_size",
            "final_logit_softcapping=None", "logit_scale=1.0",
        ),
    ),
    "selective_log_softmax": (("logits", "index"), PARAMETERS["selective_log_softmax"]),
    LOSS: (("self", "model", "inputs", "return_outputs"),),
    REFERENCE: (("self", "inputs"), ("self", "model", "inputs")),
}  # fmt: skip


def supported_utils(strict: bool) -> ModuleType:
    """``trl.trainer.utils``, of a version that has been run if ``strict``.

    Raises:
        ImportError: TRL is not installed. PatchError: its version is another one, or lacks what is called.
    """
    advice = "; patch_trl(strict=False) compares what is replaced instead"
    _contract.installed("TRL", SUPPORTED, strict, advice)
    import trl.trainer.utils as utils

    if is_fused() and not callable(vars(utils).get("maybe_gather_lm_head_ctx")):
        raise PatchError("trl.trainer.utils.maybe_gather_lm_head_ctx must be callable, got nothing that is")
    return utils


def is_fused() -> bool:
    """Whether trainers score in the fused head.  Before 1.15 they make logits, and 1.0 has no head at all."""
    return not is_before(FUSED)


def is_before(version: str) -> bool:
    import trl
    from packaging.version import InvalidVersion, Version  # TRL depends on it

    try:
        return Version(trl.__version__) < Version(f"{version}.dev0")
    except InvalidVersion:  # of a build that has none
        return False


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


def scoring_method(trainer: type) -> str:
    """The name of the method in which a trainer of groups scores tokens by calling its model."""
    return FULL_LOGITS if FULL_LOGITS in vars(trainer) else METHOD


def counts_padding(trainer: Any) -> bool:
    """Whether the loss of a trainer has the tokens behind a completion, as that of LUSPO before TRL 1.10."""
    return getattr(trainer, "loss_type", None) == "luspo" and is_before("1.10")


def preference_trainers() -> tuple[type, ...]:
    """The trainers before TRL 1.15 that score the tokens of preferences in ``LOSS``.  Takes seconds.

    KTO's is among them since TRL 1.9: earlier ones are experimental, or log the sum of all logits.
    """
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    return (DPOTrainer,) if is_before("1.9") else (DPOTrainer, KTOTrainer)


def checked(owner: Any, name: str) -> Any:
    """TRL's function ``owner.name``, which must take its ``PARAMETERS`` with these defaults."""
    known = PARAMETERS.get(f"{owner.__name__}.{name}") or PARAMETERS[name]
    return _contract.checked(owner, name, known, "TRL", SUPPORTED)


def checked_earlier(owner: Any, name: str) -> Any:
    """The same of TRL before 1.15, some of whose functions take one thing or another."""
    if name in (METHOD, FULL_LOGITS):
        return _contract.checked(owner, name, SCORING, "TRL", SUPPORTED, also=True)
    if name not in EARLIER:
        return checked(owner, name)
    known = [parameters for parameters in EARLIER[name] if parameters == _taken(owner, name)]
    return _contract.checked(owner, name, (known or EARLIER[name])[0], "TRL", SUPPORTED)


def _taken(owner: Any, name: str) -> tuple[str, ...]:
    function = vars(owner).get(name)
    return _contract.taken(function) if callable(getattr(function, "forward", function)) else ()
