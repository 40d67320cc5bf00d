"""What rlkernel takes SWIFT to be: its version, its functions and how they are called."""

from __future__ import annotations

from rlkernel.integrations import _contract

FRAMEWORK = "SWIFT"
SUPPORTED = ">=4.6.0,<4.7"  # 4.6.0 has been run, with TRL 0.29.1

TRAINERS = "swift.rlhf_trainers"
HOMES = {  # of each piece, the module that it replaces something in
    "logprobs": "trl.trainer.utils",
    "lookup": "trl.trainer.utils",
    "grpo": f"{TRAINERS}.grpo_trainer",
    "dpo": f"{TRAINERS}.dpo_trainer",
    "kto": f"{TRAINERS}.kto_trainer",
    "cpo": f"{TRAINERS}.rlhf_mixin",
    "losses": f"{TRAINERS}.gkd_loss",
    "advantages": "swift.rl_core.advantage",
}

PARAMETERS = {
    # trl.trainer.utils, which SWIFT's trainers call
    "selective_log_softmax": ("logits", "index"),
    "entropy_from_logits": ("logits", "chunk_size=128"),
    # grpo_trainer
    "GRPOTrainer._get_per_token_logps_and_entropies_single": (
        "self", "model", "model_inputs", "grpo_batch", "compute_entropy=False",
    ),
    "GRPOTrainer._get_logps_via_local_forward": (
        "self", "model", "model_inputs", "logits_to_keep", "input_ids", "compute_entropy=False",
    ),
    # dpo_trainer, kto_trainer and, of CPO and ORPO, rlhf_mixin
    "DPOTrainer.concatenated_forward": ("self", "model", "batch", "is_ref_model=False"),
    "KTOTrainer.forward": ("self", "model", "batch"),
    "RLHFTrainerMixin.concatenated_forward": ("self", "model", "batch"),
    "RLHFTrainerMixin.get_per_token_logps": (
        "self", "logits", "labels", "label_pad_token_id=-100", "reduction='mean'",
    ),
    # gkd_loss
    "gkd_loss": (
        "student_logits", "teacher_output", "labels", "beta", "temperature", "gather_fn=default_gather",
        "log_softmax_fn=default_log_softmax", "kl_div_fn=default_kl_div", "chunk_size=512",
    ),
    "jsd_loss": (
        "s_logits", "t_logits", "beta", "log_softmax_fn=default_log_softmax", "kl_div_fn=default_kl_div",
        "chunk_size=512",
    ),
    # rl_core.advantage
    "compute_advantages": (
        "rewards_per_func", "reward_weights", "num_generations", "advantage_estimator='grpo'",
        "scale_rewards='group'", "kl_in_reward=False", "beta=0.0", "kl_values=None",
    ),
}  # fmt: skip


_CONTRACT = _contract.Contract(FRAMEWORK, SUPPORTED, PARAMETERS, "swift", "ms-swift")
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked
