"""What rlkernel takes SkyRL to be: its version, its functions and how they are called."""

from __future__ import annotations

from rlkernel.integrations import _contract

SUPPORTED = ">=0.3.0,<0.4"  # 0.3.0 has been run

BACKEND = "skyrl.backends.skyrl_train"
HOMES = {  # of each part, the module that it replaces something in
    "logprobs": f"{BACKEND}.utils.torch_utils",
    "fused_head": f"{BACKEND}.workers.model_wrapper",
    "losses": f"{BACKEND}.utils.ppo_utils",
    "advantages": f"{BACKEND}.utils.ppo_utils",
}

_LOSS = (
    "log_probs", "old_log_probs", "advantages", "config", "loss_mask=None", "rollout_logprobs=None",
)  # fmt: skip
_OUTCOME = ("token_level_rewards", "response_mask", "index")

PARAMETERS = {
    # torch_utils
    "logprobs_from_logits": ("logits", "labels", "inplace_backward=True"),
    "chunked_entropy_from_logits": (
        "logits", "requires_grad=False", "attention_mask=None", "chunk_size=1024",
    ),
    # model_wrapper.HFModelWrapper
    "forward": (
        "self", "sequences", "num_actions", "attention_mask=None", "temperature=1.0", "return_output=False",
        "compute_entropy=False", "entropy_requires_grad=True", "pixel_values=None", "image_grid_thw=None",
        "mm_token_type_ids=None",
    ),
    # ppo_utils
    "ppo_policy_loss": _LOSS,
    "sapo_policy_loss": _LOSS,
    "gspo_policy_loss": _LOSS,
    "compute_policy_loss_cispo": _LOSS,
    "rollout_is_policy_loss": _LOSS,
    "cross_entropy_loss": _LOSS,
    "importance_sampling_loss": _LOSS,
    "ppo_critic_loss": ("values", "old_values", "returns", "config", "loss_mask=None"),
    "compute_approx_kl": ("log_probs", "log_probs_base", "loss_mask=None", "kl_estimator_type='k3'"),
    "compute_gae_advantage_return": (
        "token_level_rewards", "values", "response_mask", "gamma", "lambd", "**kwargs",
    ),
    "compute_grpo_outcome_advantage": (*_OUTCOME, "epsilon=1e-06", "grpo_norm_by_std=True", "**kwargs"),
    "compute_rloo_outcome_advantage": (*_OUTCOME, "**kwargs"),
    "compute_maxrl_advantage": (*_OUTCOME, "epsilon=1e-06", "**kwargs"),
    "compute_reinforce_plus_plus_outcome_advantage": (*_OUTCOME[:2], "gamma", "**kwargs"),
}  # fmt: skip


_CONTRACT = _contract.Contract("SkyRL", SUPPORTED, PARAMETERS)
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked
