"""Every family of causal language models that transformers has, made small from its default configuration."""

import dataclasses

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCAB, HIDDEN, HEADS, HEAD_DIM = 61, 32, 4, 8
WINDOW = 5

# What a size is called, and what it becomes in a configuration that has it.
SIZES = (
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (
        HIDDEN,
        """hidden_size d_model n_embd embedding_size word_embed_proj_dim input_embedding_size
        output_embedding_size emb_dim embedding_dim lru_width attention_hidden_size shape_embed_dim
        pronunciation_embed_dim shape_vocab_size pronunciation_vocab_size""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        attention_heads swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads
        linear_num_heads linear_num_value_heads mamba_num_heads mamba_n_heads num_experts
        n_routed_experts num_local_experts moe_num_experts index_n_heads zero_expert_num
        num_query_groups index_block_size index_topk attention_chunk_size num_global_key_value_heads
        indexer_n_heads indexer_kv_heads indexer_budget indexer_compress_ratio""",
    ),
    (
        HEAD_DIM,
        """head_dim qk_rope_head_dim qk_nope_head_dim d_head dim_head swa_head_dim index_head_dim
        linear_head_dim linear_key_head_dim linear_value_head_dim v_head_dim mamba_head_dim
        mamba_d_state ssm_state_size state_size rotary_dim global_head_dim attention_head_size
        kv_channels indexer_head_dim""",
    ),
    (
        16,
        """q_lora_rank kv_lora_rank moe_intermediate_size hidden_size_per_layer_input laurel_rank
        o_lora_rank expert_ffn_hidden_size qk_head_dim hc_lowrank router_hidden_size adapter_rank
        gated_norm_rank d_rel shared_expert_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size query_pre_attn_scalar mamba_d_head swa_q_lora_rank
        swa_kv_lora_rank""",
    ),
    (
        48,
        """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner ffn_hidden_size
        feed_forward_size intermediate_size_mlp shared_intermediate_size dense_intermediate_size
        moe_shared_intermediate_size""",
    ),
    (
        64,
        """max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length rel_extent
        max_target_positions max_source_positions chunk_size mamba_chunk_size mamba_d_ssm""",
    ),
    (
        2,
        """num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads
        num_experts_per_tok num_experts_per_token moe_topk moe_k mamba_n_groups n_groups
        num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers num_blocks o_groups num_kv_shared_layers conv_L_cache hc_mult hc_count""",
    ),
    (
        1,
        """index_topk_blocks n_group topk_group num_expert_group n_shared_experts num_shared_experts
        first_k_dense_replace""",
    ),
    (
        WINDOW,
        """sliding_window sliding_window_size local_attention window_size keep_window_size
        attention_window_size""",
    ),
)
SMALL = {name: size for size, names in SIZES for name in names.split()}
NO_DEFAULT = (
    "head_dim", "num_key_value_heads", "n_routed_experts", "num_experts", "num_experts_per_tok", "n_group",
    "topk_group", "n_shared_experts", "indexer_n_heads", "indexer_head_dim", "indexer_budget",
    "indexer_kv_heads", "indexer_compress_ratio",
)  # fmt: skip

# What a name alone does not say.
IMAGES = {"vision_config": {"image_size": 8, "patch_size": 4}}
FULL_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
OWN = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": FULL_ROPE},
    "dots1": {"n_shared_experts": 1},
    "gemma3": IMAGES | {"mm_tokens_per_image": 4, "image_token_id": VOCAB - 1},
    "gemma4": IMAGES,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen4_exp": {"indexer_kv_heads": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
# What defaults do not have.
SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
NOT_MADE = {
    "blt": "needs a patcher's lengths",
    "dbrx": "its default configuration has no RoPE",
    "dots3_note": "has sizes that its arguments do not reach",
    "gemma3n": "its images need timm",
    "gemma4_assistant": "runs on another model's keys",
    "gemma4_unified_assistant": "runs on another model's keys",
    "musicgen": "its configuration is three models'",
    "musicgen_melody": "its configuration is three models'",
    "xlstm": "has no attention",
    "xmod": "must be told a language",
    "zamba": "ties weights of layers that a small one lacks",
}


def text_class(kind):
    """The configuration class of a family's language model; a model of images and text has one inside."""
    whole = CONFIG_MAPPING[kind]
    text = getattr(whole, "sub_configs", {}).get("text_config")
    return text if text is not None and model_class(kind).config_class is text else whole


def model_class(kind):
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]


def families():
    """Every language model that takes registered attention, by the name of its first entry."""
    found = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found.setdefault((model_class(kind), text_class(kind)), kind)
    return [kind for (model, _), kind in found.items() if model._can_set_attn_implementation()]


def small_config(kind, **options):
    return small(text_class(kind), OWN.get(kind, {}) | options)


def small(cls, given, sizes=SMALL):
    fields = {field.name for field in dataclasses.fields(cls)}  # the rest follows from them
    have = {name: value for name, value in vars(cls()).items() if name in fields}
    parts = {name: have[name] for name in getattr(cls, "sub_configs", {}) if have.get(name) is not None}
    own = {name: size for name, size in sizes.items() if isinstance(have.get(name), int) and have[name]}
    own |= {name: sizes[name] for name in NO_DEFAULT if have.get(name, 0) is None}
    if "num_key_value_heads" in own and have["num_key_value_heads"] in (
        None,
        have.get("num_attention_heads"),
    ):
        own["num_key_value_heads"] = HEADS
    tokens = enumerate(("pad_token_id", "bos_token_id", "eos_token_id"))
    own |= {name: token for token, name in tokens if name in have}
    if isinstance(layers := have.get("num_hidden_layers"), int):
        own |= _few_layers(have, layers, sizes)
    own |= {name: small(type(part), given.get(name, {}), sizes) for name, part in parts.items()}
    return cls(**own | {name: value for name, value in given.items() if name not in parts})


def _few_layers(have, layers, sizes):
    """One layer of each type, two at least, and what lists say of them."""
    types = have.get("layer_types") or have.get("layers_block_type") or list(range(layers))
    first = sorted({types.index(each) for each in types})
    keep = (first if 1 < len(first) < layers else [0, 1])[:6]
    if have.get("num_kv_shared_layers"):
        keep = keep + keep
    lists = {n: x for n, x in have.items() if isinstance(x, list) and len(x) == layers}
    return {name: [sizes.get(name, x[i]) for i in keep] for name, x in lists.items()} | {
        "num_hidden_layers": len(keep)
    }


def make(kind, attention=None, **options):
    """A family's model, on its own attention or on another, with weights that let no error hide."""
    model = model_class(kind)._from_config(small_config(kind, **options), attn_implementation=attention)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()
