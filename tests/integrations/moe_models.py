"""Mixtures of experts of transformers made small, one of each family whose router is known."""

import torch
import transformers

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

# family -> its config, and its own names of what it has
FAMILIES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True}),
}
EXPERTS, TOP_K = 8, 2


def make(family, dtype=torch.float32, seed=0, **options):
    """A model in training mode whose routers decide clearly, and not all alike."""
    kind, own = FAMILIES[family]
    config = getattr(transformers, kind)(**COMMON | own | options)
    # the other implementations have no fp64
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
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
