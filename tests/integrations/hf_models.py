"""Models of transformers made small, samples that share prompts, and each sample run alone."""

import copy
import functools

import torch
import transformers

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # gpt-oss' own one is meant for longer contexts

CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": ROPE,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    # what the ten above do not have
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "minicpm3": (
        "MiniCPM3Config",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8,
        },
    ),  # fmt: skip
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),  # fmt: skip
    "gpt2": ("GPT2Config", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
}  # fmt: skip
TEN = tuple(CONFIGS)[:10]

PROMPTS = [[(7 * i + 3 * b) % (VOCAB - 3) + 3 for i in range(n)] for b, n in enumerate((11, 5, 1))]
COMPLETIONS = [
    [[(5 * i + 11 * g + 17 * b) % (VOCAB - 3) + 3 for i in range(n)] for g, n in enumerate(group)]
    for b, group in enumerate(((4, 7, 0, 3), (2, 6), (3, 3, 1)))
]
SAMPLES = [(p, c) for p, group in zip(PROMPTS, COMPLETIONS, strict=True) for c in group]


def make(name, dtype=torch.float64, attention=None, **options):
    """A model in training mode with weights that let no error hide, on the attention that is right for it."""
    kind, own = CONFIGS[name]
    if name == "gemma2" and attention is None:
        attention = "eager"  # transformers 5.17 still chooses sdpa, which forgets the softcap
    config = getattr(transformers, kind)(**COMMON | own | options)
    experts = (
        {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    )  # the other one has no fp64
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention, **experts
    )
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2 if p.ndim > 1 else 0.5)
    return model.to(dtype).train()


def alone(model, samples=None, temperature=1.0):
    """(logprobs, entropy) of each sample's completion, every sample a call of its own."""
    found = []
    for prompt, completion in SAMPLES if samples is None else samples:
        ids = torch.tensor([prompt + completion])
        rows = slice(max(len(prompt) - 1, 0), ids.shape[1] - 1)
        logits = model(ids, use_cache=False).logits[0, rows].to(torch.float64) / temperature
        logp = logits.log_softmax(-1)
        taken = logp.gather(1, ids[0, rows.start + 1 :, None])[:, 0]
        found.append((taken, -(logp.exp() * logp).sum(-1)))
    return found


def padded(samples=None):
    """The samples in one batch, padded on the right."""
    rows = [prompt + completion for prompt, completion in (SAMPLES if samples is None else samples)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids, mask


def weights(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model, loss):
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@functools.cache
def dense(name):
    """What packed passes must give: logprobs, entropy, gradients of a weighted sum of both."""
    model = make(name)
    found = alone(model)
    logprobs, entropy = (torch.cat(x) for x in zip(*found, strict=True))
    w = weights(len(logprobs))
    grads = gradients(model, (logprobs * w).sum() + (entropy * w.flip(0)).sum())
    return logprobs.detach(), entropy.detach(), grads


def worst(found, expected):
    """The largest error of a parameter's gradient, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp_min(1e-30))
        for n in expected
    )
