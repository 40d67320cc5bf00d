"""The words that arguments take, as types: what a type checker tells apart from a misspelt one.

from rlkernel.types import LossType

def run(loss_type: LossType = "dapo") -> None: ...
"""

from typing import Literal

# Backends, and the ways of one that has several
Backend = Literal["auto", "native", "flashinfer", "aiter", "triton", "reference"]
LinearAlgorithm = Literal["auto", "tiled", "fused"]
LinearPolicyAlgorithm = Literal["auto", "one_pass", "two_pass", "fused"]
Parity = Literal["fast", "bitwise"]
InvarianceLevel = Literal["batch", "tensor_parallel"]

# policy_loss, linear_policy_loss and value_loss
LossType = Literal[
    "grpo", "ppo", "dapo", "dr_grpo", "bnpo", "cispo", "cispo_cap", "cispo_mask", "reinforce", "gpg", "sapo",
    "gmpo", "dppo_tv", "dppo_kl", "vespo", "clip_cov", "kl_cov", "importance_sampling", "dro",
]  # fmt: skip
PolicyPreset = Literal[
    "ppo", "grpo", "dapo", "dr_grpo", "bnpo", "gspo", "gspo_token", "luspo", "cispo", "reinforce", "gpg",
    "sapo", "gmpo", "dppo_tv", "dppo_kl", "vespo", "clip_cov", "kl_cov",
]  # fmt: skip
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]
PolicyKlEstimator = Literal["k1", "k1+", "abs", "abs+", "k2", "k2+", "k3", "k3+"]
KlFactor = Literal["ratio", "token", "score", "rollout"]
Correction = Literal[
    "token_tis", "icepop", "seq_tis", "geometric_rejection", "verl:decoupled_token_is",
    "verl:decoupled_seq_is", "verl:decoupled_token_icepop", "verl:decoupled_seq_is_rs",
    "verl:decoupled_geo_rs", "verl:decoupled_geo_rs_seq_tis", "verl:decoupled_geo_rs_token_tis",
    "verl:decoupled_k3_rs", "verl:decoupled_k3_rs_seq_tis", "verl:decoupled_k3_rs_token_tis",
    "trl:sequence_mask", "trl:sequence_truncate", "trl:token_mask", "trl:token_truncate", "skyrl:token_tis",
    "skyrl:sequence_tis", "skyrl:geometric", "skyrl:product", "skyrl:outlier", "nemo_rl:tis",
    "nemo_rl:icepop", "nemo_rl:seq_mask_tis", "slime:tis", "slime:icepop", "prime_rl:dppo", "prime_rl:ipo",
    "areal:m2po",
]  # fmt: skip
CorrectionLevel = Literal["none", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask", "reject"]
CorrectionDenominator = Literal["keep", "shrink"]
Divergence = Literal["tv", "kl"]
ValueLoss = Literal["mse", "huber"]

# preference_loss
PreferenceLossType = Literal[
    "sft", "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "orpo", "simpo", "kto",
    "apo_zero_unpaired", "ipo_sum", "cpo",
]  # fmt: skip
PreferencePreset = Literal[
    "dpo", "cdpo", "rdpo", "slic", "ipo", "exo", "nca", "mpo", "ld_dpo", "cpo", "simpo", "cpo_simpo", "orpo",
    "kto", "apo_zero", "apo_down", "discopop",
]  # fmt: skip
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

# Advantages and rewards
AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "maxrl", "grpo_passk", "gdpo", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "remax",
]  # fmt: skip
ScaleRewards = Literal["group", "batch", "none"]
Singletons = Literal["zero", "reward"]
EpsIn = Literal["variance", "std"]
Holes = Literal["skip", "zero"]
KlEstimator = Literal["k1", "abs", "k2", "k3"]

# sample, sample_linear, score_tokens and verify_chain
FilterOrder = Literal["sequential", "joint", "top_k_first"]
SamplingMethod = Literal["grouped", "gumbel"]
LogprobKind = Literal["raw", "tempered", "processed"]
GreedyLogprobs = Literal["argmax", "softmax"]
RankTies = Literal["first", "max"]
StoreLogits = Literal["auto"]

# linear_logprob and the small layers
Statistic = Literal["mean_logits", "is_top1", "log_sum_sq_probs", "min_logits", "max_logits"]
InputScheme = Literal["token", "group", "group_ue8m0"]
NormRounding = Literal["before_weight", "after_weight"]
RotaryRounding = Literal["before_sum", "after_sum"]
SwigluRounding = Literal["before_product", "after_product"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

# patch_axolotl, patch_trl and patch_vllm
Require = Literal["require"]
Dropout = Literal["own", "shared"]
VllmOp = Literal["sampler", "support", "prompt_logprobs", "rejection", "attention", "v2"]

# patch_areal, patch_llamafactory, patch_megatron, patch_openrlhf, patch_sglang, patch_skyrl, patch_swift and
# patch_verl
ArealPart = Literal["logprobs", "fused_head", "advantages"]
LlamafactoryPart = Literal["logprobs", "dpo", "kto", "sft", "v1"]
MegatronPart = Literal["cross_entropy", "fused_head"]
OpenRlhfPart = Literal["logprobs", "fused_head", "losses", "advantages"]
SglangPart = Literal["sampler", "prompt_logprobs"]
SkyrlPart = Literal["logprobs", "fused_head", "losses", "advantages"]
SwiftPart = Literal["logprobs", "fused_head", "losses", "advantages"]
VerlPart = Literal["logprobs", "fused_head", "losses", "advantages"]
