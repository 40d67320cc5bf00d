"""What rlkernel takes OpenRLHF to be: its version, its functions and how they are called."""

from __future__ import annotations

from rlkernel.integrations import _contract

SUPPORTED = ">=0.11.2,<0.12"  # 0.11.2 has been run

_OF_BATCH = ("dp_size=1", "batch_num_tokens=None", "global_batch_size=None")

PARAMETERS = {
    # openrlhf.models.utils
    "log_probs_from_logits": ("logits", "labels", "temperature=1.0"),
    "compute_entropy": ("logits",),
    "compute_reward": ("r", "kl_coef", "kl", "action_mask=None", "reward_clip_range=None"),
    # openrlhf.models.ring_attn_utils, which is called
    "unpad_and_slice_tensor": ("sequences", "attention_mask", "ring_attn_group"),
    "gather_and_pad_tensor": (
        "tensor", "ring_attn_group", "ring_attn_pad_len", "indices", "batch", "seqlen",
    ),
    "get_tensor_in_current_ring_attn_rank": ("tensors", "ring_attn_group", "pad_id"),
    # openrlhf.models.actor
    "Actor.forward": (
        "self", "sequences", "action_mask=None", "attention_mask=None", "return_output=False",
        "allgather_logits=False", "return_logprobs=False", "ring_attn_group=None", "packed_seq_lens=None",
        "return_entropy=False", "**mm_inputs",
    ),
    # openrlhf.models.loss
    "PolicyLoss.__init__": (
        "self", "clip_eps_low=0.2", "clip_eps_high=0.2", "dual_clip=None", "token_level_loss=True",
        "policy_loss_type='ppo'", "is_correction_level='off'", "is_correction_mode='mask'",
        "is_correction_gating='ratio'", "is_correction_threshold=(0.5, 5.0)",
    ),
    "PolicyLoss.forward": (
        "self", "log_probs", "old_log_probs", "advantages", "action_mask=None", "rollout_log_probs=None",
        *_OF_BATCH,
    ),
    "ValueLoss.__init__": ("self", "clip_eps=None", "token_level_loss=True"),
    "ValueLoss.forward": ("self", "values", "old_values", "returns", "action_mask=None", *_OF_BATCH),
    "DPOLoss.__init__": ("self", "beta", "label_smoothing=0.0", "ipo=False"),
    "DPOLoss.forward": (
        "self", "policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps",
        "reference_rejected_logps",
    ),
    # openrlhf.trainer.ppo_utils.experience_maker
    "RemoteExperienceMaker.compute_advantages_and_returns": ("self", "experiences"),
    "RemoteExperienceMaker.get_advantages_and_returns": (
        "self", "values", "rewards", "action_mask", "gamma", "lambd",
    ),
    "RemoteExperienceMaker.get_cumulative_returns": ("self", "rewards", "action_mask", "gamma"),
}  # fmt: skip


_CONTRACT = _contract.Contract("OpenRLHF", SUPPORTED, PARAMETERS)
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked
