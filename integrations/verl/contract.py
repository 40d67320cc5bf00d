"""What rlkernel takes verl to be: its version, its functions and how they are called."""

from __future__ import annotations

from rlkernel.integrations import _contract

SUPPORTED = ">=0.9.1,<0.10"  # 0.9.1 has been run

_LOSS = (
    "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode='token-mean'", "config=None",
    "rollout_is_weights=None",
)  # fmt: skip
_SEQUENCE_LOSS = tuple(x.replace("'token-mean'", "'seq-mean-token-mean'") for x in _LOSS)
_OUTCOME = ("token_level_rewards", "response_mask", "index", "epsilon=1e-06")
_SCALED = (*_OUTCOME, "norm_adv_by_std_in_grpo=True", "config=None")
_PLAIN = (*_OUTCOME, "config=None", "**kwargs")

PARAMETERS = {
    # verl.utils.torch_functional
    "logprobs_from_logits": ("logits", "labels", "inplace_backward=True"),
    "entropy_from_logits": ("logits",),
    "entropy_from_logits_with_chunking": ("logits", "chunk_size=2048"),
    # verl.utils.megatron.tensor_parallel
    "vocab_parallel_log_probs_from_logits": ("logits", "labels"),
    "vocab_parallel_entropy": ("vocab_parallel_logits",),
    "vocab_parallel_entropy_with_chunking": ("vocab_parallel_logits", "chunk_size=2048"),
    # verl.utils.experimental.torch_functional.FusedLinearForPPO
    "__init__": ("self", "chunk_size=512", "impl_backend='torch'"),
    "forward": ("self", "hidden_states", "vocab_weights", "input_ids", "temperature=1.0"),
    # verl.utils.kernel.linear_cross_entropy
    "LinearCrossEntropy": (
        "hidden", "weight", "labels", "temperature=1.0", "reduction='none'", "dist_process_group=None",
    ),
    # verl.trainer.ppo.core_algos
    "compute_policy_loss_vanilla": _LOSS,
    "compute_policy_loss_dppo_tv": _LOSS,
    "compute_policy_loss_dppo_kl": _LOSS,
    "compute_policy_loss_gspo": _SEQUENCE_LOSS,
    "compute_policy_loss_sapo": _SEQUENCE_LOSS,
    "compute_policy_loss_gpg": _LOSS,
    "compute_policy_loss_geo_mean": _LOSS,
    "compute_policy_loss_dro": _LOSS,
    "compute_policy_loss_cispo": _LOSS,
    "compute_policy_loss_reinforce": (
        "rollout_log_prob", *_LOSS[1:4], "loss_agg_mode='seq-mean-token-sum'", *_LOSS[5:],
    ),
    "compute_value_loss": (
        "vpreds", "returns", "values", "response_mask", "cliprange_value", "loss_agg_mode='token-mean'",
        "dp_size=1", "batch_num_tokens=None", "global_batch_size=None", "loss_scale_factor=None",
    ),
    "compute_gae_advantage_return": ("token_level_rewards", "values", "response_mask", "gamma", "lam"),
    "compute_grpo_outcome_advantage": _SCALED,
    "compute_grpo_vectorized_outcome_advantage": _SCALED,
    "compute_gdpo_outcome_advantage": (*_SCALED, "non_tensor_batch=None", "batch=None", "**kwargs"),
    "compute_grpo_passk_outcome_advantage": (*_SCALED, "**kwargs"),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": _PLAIN,
    "compute_rloo_outcome_advantage": _PLAIN,
    "compute_rloo_vectorized_outcome_advantage": _PLAIN,
    "compute_opo_outcome_advantage": _PLAIN,
    "compute_reinforce_plus_plus_outcome_advantage": (
        "token_level_rewards", "response_mask", "config=None", "**kwargs",
    ),
    "compute_remax_outcome_advantage": (
        "token_level_rewards", "reward_baselines", "response_mask", "config=None", "**kwargs",
    ),
    "compute_gpg_outcome_advantage": (*_OUTCOME, "f_norm=1.0", "alpha=1.0", "config=None", "**kwargs"),
}  # fmt: skip


_CONTRACT = _contract.Contract("verl", SUPPORTED, PARAMETERS)
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked
