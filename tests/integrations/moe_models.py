"""Mixtures of experts of transformers made small, one of each family whose router is known."""

import hf_families
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

EXPERTS, TOP_K = 8, 2
NUM = {"num_experts": EXPERTS}
LOCAL = {"num_local_experts": EXPERTS}
GROUPS = {
    "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
INDEXED = GROUPS | LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
SHARED = NUM | {"shared_expert_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # gpt-oss' own one is meant for longer contexts

# family -> its config, and what that calls things
FAMILIES = {
    "mixtral": ("MixtralConfig", LOCAL),
    "qwen2_moe": ("Qwen2MoeConfig", SHARED),
    "qwen3_moe": ("Qwen3MoeConfig", NUM | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", NUM),
    "deepseek_v3": ("DeepseekV3Config", GROUPS | LATENT),
    "gpt_oss": ("GptOssConfig", LOCAL | {"rope_parameters": ROPE}),
    "deepseek_v2": ("DeepseekV2Config", GROUPS | LATENT | {"topk_method": "group_limited_greedy"}),
    "afmoe": ("AfmoeConfig", NUM),
    "axk1": ("AXK1Config", GROUPS | LATENT),
    "cohere2_moe": ("Cohere2MoeConfig", NUM),
    "deepseek_v32": ("DeepseekV32Config", INDEXED),
    "dots1": ("Dots1Config", GROUPS),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {"moe_num_experts": EXPERTS, "moe_k": TOP_K}),
    "exaone_moe": ("ExaoneMoeConfig", GROUPS | NUM),
    "flex_olmo": ("FlexOlmoConfig", NUM),
    "glm4_moe": ("Glm4MoeConfig", GROUPS),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", GROUPS | LATENT),
    "glm_moe_dsa": ("GlmMoeDsaConfig", INDEXED),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
    "granitemoe_swa": ("GraniteMoeSWAConfig", LOCAL),
    "granitemoeshared": ("GraniteMoeSharedConfig", LOCAL | {"shared_intermediate_size": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", NUM | {"moe_topk": TOP_K}),
    "hy_v3": ("HYV3Config", NUM),
    "jamba": (
        "JambaConfig",
        NUM | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    ),
    "laguna": ("LagunaConfig", NUM | {"num_attention_heads_per_layer": [4, 4, 4]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        NUM | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "mellum": ("MellumConfig", NUM),
    "mimo_v2_flash": ("MiMoV2FlashConfig", GROUPS),
    "minimax": ("MiniMaxConfig", LOCAL),
    "minimax_m2": ("MiniMaxM2Config", LOCAL),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", SHARED | LINEAR),
    "qwen3_next": ("Qwen3NextConfig", SHARED | LINEAR),
    "solar_open": ("SolarOpenConfig", GROUPS),
}
SIX = tuple(FAMILIES)[:6]
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
}  # fmt: skip
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}}
FAMILIES |= {  # with images, which the tests give them none of
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": COMMON | NUM | SECTIONS,
            "vision_config": VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        {"text_config": COMMON | GROUPS | SECTIONS, "vision_config": VISION},
    ),
}
# family -> what its name and hf_families do not say
OTHERS = {
    "aria_text": {},
    "axk2": {},
    "bailing_hybrid": LOCAL | {"num_experts_per_tok": TOP_K, "n_group": 4, "topk_group": 2},
    "deepseek_ocr2": {
        "text_config": {
            "num_experts_per_tok": TOP_K, "n_group": 1, "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": NUM | {"enable_moe_block": True, "top_k_experts": TOP_K, "moe_intermediate_size": 16},
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "granitemoehybrid": {},
    "hy_v4": {},
    "hy_v4_vl": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}},
    "inkling_text": {},
    "inkling2_text": {},
    "kimi_linear": NUM | {"num_experts_per_tok": TOP_K},
    "kolibri1": NUM,
    "lara_mini": {},
    "minimax_m3_vl_text": {},
    "mistral4": {},
    "mistral_large4": {},
    "nemotron_h": {},
    "qwen3_omni_moe_thinker": {},
    "qwen4_exp": {},
    "step3p7": {
        "text_config": {
            "sliding_window": 5, "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "sliding_attention"],
        }
    },
    "unlimited_ocr": {},
}  # fmt: skip
SIZES = hf_families.SMALL | dict.fromkeys(
    ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts"), EXPERTS
)
EVERY = (*FAMILIES, *OTHERS)


def make(family, dtype=torch.float32, seed=0, implementation="eager", **options):
    """A model in training mode whose routers decide clearly, and not all alike."""
    if family in OTHERS:
        texts = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind = hf_families.text_class(family) if texts else CONFIG_MAPPING[family]
        config = hf_families.small(kind, hf_families.OWN.get(family, {}) | OTHERS[family] | options, SIZES)
    else:
        kind, own = FAMILIES[family]
        texts = "vision_config" not in own
        config = getattr(transformers, kind)(**(COMMON if texts else {}) | own | options)
    build = transformers.AutoModelForImageTextToText.from_config
    if texts:
        build = transformers.AutoModelForCausalLM.from_config
    elif family == "mistral4":  # the texts of a model that has images too
        build = transformers.Mistral4ForCausalLM._from_config
    model = build(config, experts_implementation=implementation)  # "eager" alone has fp64
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
    return model.to(dtype).train()


def tokens(rows=3, length=8, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model, ids, backward=True):
    """(logits, gradients) of a loss that every logit counts in."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    if backward:
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), gradients(model)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def state(model):
    """Every attribute of every module that is no tensor, as objects: what a patch must leave as it was."""
    return {
        (path, name, len(value) if name.endswith("_hooks") else 0): id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }
