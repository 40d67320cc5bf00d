"""What rlkernel takes SGLang to be: its version, what is replaced and what replacements call."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

SUPPORTED = ">=0.5.23,<0.5.24"  # 0.5.23 has been run

_ATTENTION = (
    "self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens",
)  # fmt: skip
_OPTIONS = (
    "encoder_lens=None", "scaling=None", "enable_gqa=False", "causal=False", "is_cross_attn=False",
    "sliding_window_size=None",
)  # fmt: skip
_TOPK = (
    "hidden_states", "gating_output", "topk", "renormalize", "correction_bias=None", "scoring_func='softmax'",
    "routed_scaling_factor=None", "apply_routed_scaling_factor_on_output=False", "num_fused_shared_experts=0",
    "packed_out=None", "num_token_non_padded=None",
)  # fmt: skip
PARAMETERS = {
    # sglang.srt.layers.sampler
    "Sampler.forward": (
        "self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs",
        "positions", "logprob_logits=None",
    ),
    "Sampler._preprocess_logits": ("self", "logits", "sampling_info"),
    "Sampler._sync_token_ids_across_tp": ("self", "batch_next_token_ids", "sampling_info"),
    "register_sampler_backend": ("backend", "factory"),
    # sglang.srt.layers.logprob_processor
    "InputLogprobProcessor._forward_by_chunk": (
        "self", "pruned_states", "sample_indices", "input_logprob_indices", "token_to_seq_idx", "lm_head",
        "get_logits_fn", "logits_metadata", "chunk_size", "borrow_logprob_memory=False",
        "borrow_logits_memory=False",
    ),
    # layers, of a batch_invariant patch
    "RMSNorm": ("self", "x", "residual=None", "post_residual_addition=None", "quant_linear=None"),
    "Gemma3RMSNorm": ("self", "x", "residual=None"),
    "SiluAndMul": ("self", "x"),
    "GeluAndMul": ("self", "x"),
    "Gemma3TextScaledWordEmbedding": ("self", "input_ids"),
    "apply_rotary_pos_emb": ("q", "k", "cos", "sin", "unsqueeze_dim=1"),
    "RotaryEmbedding": (
        "self", "positions", "query", "key", "offsets=None", "fused_set_kv_buffer_arg=None",
    ),
    "TorchNativeAttnBackend._run_sdpa_forward_extend": (
        *_ATTENTION, "extend_prefix_lens", "extend_seq_lens", *_OPTIONS,
    ),
    "TorchNativeAttnBackend._run_sdpa_forward_decode": (*_ATTENTION, *_OPTIONS),
    "ModelRunner.load_model": ("self",),
    "fused_topk": _TOPK,
    "fused_topk_native": _TOPK[:6],
    "moe_forward_native": ("layer", "x", "topk_output", "moe_runner_config"),
}  # fmt: skip

FIELDS = {  # that are read or written
    "SamplingBatchInfo": (
        "temperatures", "top_ps", "top_ks", "min_ps", "is_all_greedy", "need_top_p_sampling",
        "need_top_k_sampling", "need_min_p_sampling", "sampling_seed", "sampling_mask_batch_indices",
    ),
    "LogprobResult": (
        "token_logprobs", "top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val",
        "token_ids_logprobs_idx", "input_copy_done",
    ),
    "LogitsMetadata": (
        "extend_return_top_logprob", "extend_token_ids_logprob", "top_logprobs_nums", "token_ids_logprobs",
        "extend_logprob_pruned_lens_cpu", "extend_input_logprob_token_ids_gpu", "sample_indices_cpu",
        "input_logprob_indices_cpu",
    ),
}  # fmt: skip


_CONTRACT = _contract.Contract("SGLang", SUPPORTED, PARAMETERS)
require_version, checked = _CONTRACT.require_version, _CONTRACT.checked


def check_fields(kind: Any) -> None:
    """Of a dataclass: all of its ``FIELDS`` must be there."""
    found = {field.name for field in dataclasses.fields(kind)}
    if missing := [name for name in FIELDS[kind.__name__] if name not in found]:
        raise PatchError(f"{kind.__name__} must have the fields {', '.join(missing)}: this is another SGLang")
