"""What rlkernel takes DeepSpeed and DeepSpeed-Chat to be: versions, functions and how they are called."""

from __future__ import annotations

from typing import Any

import torch

from rlkernel.integrations import _contract

SUPPORTED = ">=0.19,<0.20"  # 0.19.8 has been run

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # what its functions are replaced for

LINEAR = "_VocabParallelLinearCrossEntropy"
LINEAR_PARAMETERS = (
    "hidden", "weight", "bias", "target", "tp_group", "vocab_start_index", "vocab_end_index", "ignore_index",
    "chunk_rows", "compute_dtype",
)  # fmt: skip
CROSS_ENTROPY = "_VocabParallelCrossEntropy"
CROSS_ENTROPY_PARAMETERS = (
    "vocab_parallel_logits", "target", "tp_group", "vocab_start_index", "vocab_end_index", "ignore_index",
)  # fmt: skip
LOGPROBS = "_VocabParallelLogProbs"
LOGPROBS_PARAMETERS = ("vocab_parallel_logits", "index", "tp_group", "vocab_start_index", "ignore_index")
ENTROPY = "_VocabParallelEntropy"
ENTROPY_PARAMETERS = ("vocab_parallel_logits", "tp_group")
KL = "_VocabParallelKLDiv"
KL_PARAMETERS = ("student_logits", "teacher_logits", "reverse", "tp_group")
JSD = "generalized_jsd_loss"
JSD_PARAMETERS = (
    "student_logits", "teacher_logits", "response_mask", "beta=0.5", "temperature=1.0", "teacher_top_k=None",
    "pointwise_clip=None",
)  # fmt: skip

TRAINER = "DeepSpeedPPOTrainer"
GATHER = "gather_log_probs"
GATHER_PARAMETERS = ("logits", "labels")
METHODS = {
    "generate_experience": ("self", "prompts", "mask", "step"),
    "train_rlhf": ("self", "inputs"),
    "actor_loss_fn": ("self", "logprobs", "old_logprobs", "advantages", "mask"),
    "critic_loss_fn": ("self", "values", "old_values", "returns", "mask"),
    "get_advantages_and_returns": ("self", "values", "rewards", "start"),
}


def require_version(strict: bool) -> None:
    """Raises:
    ImportError: DeepSpeed is not installed. PatchError: its version is one that has not been run.
    """
    advice = "; patch_deepspeed(strict=False) compares what is replaced instead"
    _contract.installed("DeepSpeed", SUPPORTED, strict, advice)


def checked(owner: Any, name: str, parameters: tuple[str, ...]) -> Any:
    """DeepSpeed's function ``owner.name``, which must take ``parameters`` with these defaults."""
    return _contract.checked(owner, name, parameters, "DeepSpeed", SUPPORTED)


def unsupported_dtype(**tensors: torch.Tensor) -> str | None:
    return next((f"{name} is {x.dtype}" for name, x in tensors.items() if x.dtype not in FLOATS), None)
