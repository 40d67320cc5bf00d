"""Keywords as type checkers read them: in overloads, and where a function hands them on by ``**options``.

Their defaults, and what they mean, are in the signatures; a test holds the two together.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedPlan
from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection
from rlkernel.prefix.batch import PrefixBatch
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.types import (
    Correction,
    ImportanceSamplingLevel,
    InputScheme,
    KlFactor,
    LinearAlgorithm,
    LinearPolicyAlgorithm,
    LossAggMode,
    LossType,
    Parity,
    PolicyKlEstimator,
)


class LogprobOptions(TypedDict, total=False):
    temperature: float | Tensor
    ignore_index: int
    inplace_backward: bool
    support_ids: Tensor | None
    support_offsets: Tensor | None
    group: Any
    vocab_start: int | None


class LinearLogprobOptions(TypedDict, total=False):
    bias: Tensor | None
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    ignore_index: int
    logits_dtype: torch.dtype
    algorithm: LinearAlgorithm
    support_ids: Tensor | None
    support_offsets: Tensor | None
    group: Any
    vocab_start: int | None
    weight_scale: Tensor | None
    weight_block_size: Sequence[int]
    input_scale: Tensor | InputScheme | None


class HandedOn(TypedDict, total=False):
    """What ``linear_policy_loss`` hands on to ``policy_loss``."""

    loss_type: LossType
    loss_agg_mode: LossAggMode
    importance_sampling_level: ImportanceSamplingLevel
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    clip_ratio_c: float | None
    log_ratio_clip: float | None
    tau_pos: float
    tau_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    ppo_kl_coef: float
    dro_beta: float | None
    seed: int
    beta: float
    ref_logprobs: Tensor | None
    kl_estimator: PolicyKlEstimator
    use_bias_correction_kl: bool | KlFactor
    kl_input_clamp: float | None
    kl_output_clamp: float | None
    rollout_logprobs: Tensor | None
    correction: RolloutCorrection | Correction | None
    staleness: Tensor | None
    num_items_in_batch: float | Tensor | None
    token_counts: Tensor | None
    loss_scale_factor: float | None
    dp_size: int


class LinearPolicyLossOptions(HandedOn, total=False):
    bias: Tensor | None
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    entropy_coef: float
    logits_dtype: torch.dtype
    algorithm: LinearPolicyAlgorithm
    cu_seqlens: Tensor | None


class _AttentionOptions(TypedDict, total=False):
    scale: float | None
    softcap: float | None
    window: int | None
    sinks: Tensor | None


class AttentionOptions(_AttentionOptions, total=False):
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    batch: PrefixBatch | PrefixLayout | None


class PrefixAttentionOptions(_AttentionOptions, total=False):
    parity: Parity


class PagedAttentionOptions(_AttentionOptions, total=False):
    plan: PagedPlan | None
