"""On-policy training of small models of transformers: what a rollout and a trainer say of a token."""

import pytest
import torch

import rlkernel
from rlkernel.integrations.hf.models import behind

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "max_position_embeddings": 128}
EXPERTS = {"head_dim": 16, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    # windows of 8 in every second layer; Gemma 2 with softcaps too, gpt-oss with sinks
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **GEMMA)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, **GEMMA)),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4, sliding_window=8)
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=32, num_experts=8)
    ),
}
ON_OURS = ("gemma2", "gemma3", "gpt-oss")
LENGTHS = (3, 9, 21, 40)


def made(family, dtype, ours=False):
    """On torch's default device; on rlkernel's attention where the model or ``ours`` wants it."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, biases and sinks that are not all alike
            parameter.data += 0.2 * torch.randn_like(parameter)
    if ours or family in ON_OURS:
        model.set_attn_implementation(rlkernel.register_hf())
    return model


def generator(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def rollout(model, prompts, new):
    """Prompts in two chunks, then token by token behind a cache: (tokens, log-probabilities) of each."""
    g = generator(1)
    found = []
    for prompt in prompts:
        cache, tokens, logprobs = transformers.DynamicCache(config=model.config), prompt.tolist(), []
        cut = max(1, len(prompt) * 2 // 3)
        chunks = [prompt[:cut], prompt[cut:]] if cut < len(prompt) else [prompt]
        for chunk in chunks:
            logits = model(input_ids=chunk[None], **behind(model, cache)).logits[0, -1]
        for _ in range(new):
            logp = logits.float().log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=g))
            tokens.append(token)
            logprobs.append(logp[token])
            step = torch.tensor([[token]])
            logits = model(input_ids=step, **behind(model, cache)).logits[0, -1]
        found.append((torch.tensor(tokens), torch.stack(logprobs)))
    return found


def scored(model, samples, new, left):
    """What a trainer computes of the whole sequences, padded on the left or on the right."""
    longest = max(len(tokens) for tokens, _ in samples)
    ids, mask = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(2))
    for i, (tokens, _) in enumerate(samples):
        where = slice(longest - len(tokens), longest) if left else slice(0, len(tokens))
        ids[i, where], mask[i, where] = tokens, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logp = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float().log_softmax(-1)
    logp = logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    ends = [longest if left else len(tokens) for tokens, _ in samples]
    return torch.stack([row[end - 1 - new : end - 1] for row, end in zip(logp, ends, strict=True)])


def differences(family, dtype, mode, steps, new=6, lengths=LENGTHS, ours=False):
    """The largest |train - rollout| of each optimiser step."""
    model = made(family, dtype, ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = generator(2)
    found = []
    with mode:
        for step in range(steps):
            prompts = [torch.randint(160, (n,), generator=g) for n in lengths]
            with torch.no_grad():
                samples = rollout(model, prompts, new)
            logp = scored(model, samples, new, left=bool(step % 2))
            old = torch.stack([x for _, x in samples])
            found.append((logp.detach() - old).abs().max().item())
            loss = -(torch.exp(logp - old) * torch.linspace(-1, 1, len(old))[:, None]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found
