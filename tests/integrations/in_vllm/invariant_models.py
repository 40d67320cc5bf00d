"""Small models of several families, what an engine reports of them, and what transformers computes."""

import contextlib
import random

import engines
import tiny
import torch
import transformers

import rlkernel

OPS = ("sampler", "attention", "prompt_logprobs", "support")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 24}
FAMILIES = {
    "Qwen3": {"head_dim": 64},
    "Qwen2": {},
    "Llama": {"rope_parameters": LLAMA3},
    "Mistral": {"head_dim": 64, "sliding_window": None},
    "Gemma2": GEMMA | {"final_logit_softcapping": 8.0, "attn_logit_softcapping": 4.0},
    "Gemma3": GEMMA | {"sliding_window_pattern": 2},
    "Qwen3Moe": {"head_dim": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
}
# prefills in chunks beside steps of others, and prefixes from the cache
ENGINE = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}


def saved(path, family, dtype):
    torch.manual_seed(0)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases that are not all alike
            parameter.data += 0.2 * torch.randn_like(parameter)
        if name.endswith("mlp.gate.weight"):  # of a router
            parameter.data.normal_(std=0.3)
        if name == "model.norm.weight" and family in ("Gemma2", "Gemma3"):  # lest a token predict itself
            parameter.data.normal_(mean=-1)
    model.to(dtype).save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    return str(path)


def loaded(path, dtype):
    """As transformers makes it; on the attention that serves softcaps where the model has one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation(rlkernel.register_hf())
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


def prompts(lengths=(1, 17, 70)):
    """Two more share their beginning."""
    draw = random.Random(3)
    made = [[draw.randrange(3, 512) for _ in range(n)] for n in lengths]
    shared = [draw.randrange(3, 512) for _ in range(40)]
    return made + [[*shared, i, 7] for i in range(2)]


class Sample:
    """The tokens of a request, and the log-probabilities that the engine reported of the last of them."""

    def __init__(self, prompt, tokens, logprobs):
        self.prompt, self.tokens, self.logprobs = list(prompt), list(tokens), torch.tensor(logprobs)
        self.ids = self.prompt + self.tokens


def rollout(llm, asked=None, **options):
    from vllm import SamplingParams

    options = {"n": 2, "max_tokens": 16, "logprobs": 1, "ignore_eos": True, "detokenize": False} | options
    asked = [{"prompt_token_ids": p} for p in asked or prompts()]
    return llm.generate(
        asked, SamplingParams(temperature=options.pop("temperature", 1.0), **options), use_tqdm=False
    )


def samples(found):
    return [
        Sample(request.prompt_token_ids, sample.token_ids, _reported(sample.logprobs, sample.token_ids))
        for request in found
        for sample in request.outputs
    ]


def prompt_samples(found):
    """The tokens of the prompts behind their first, as if they had been sampled."""
    return [
        Sample(ids[:1], ids[1:], _reported(request.prompt_logprobs[1:], ids[1:]))
        for request in found
        if len(ids := request.prompt_token_ids) > 1
    ]


def _reported(steps, tokens):
    return [step[token].logprob for step, token in zip(steps, tokens, strict=True)]


def batch(found):
    """What a trainer gives its model, padded on either side; the rows of the tokens, and the tokens."""
    longest = max(len(x.ids) for x in found)
    ids, mask = (torch.zeros(len(found), longest, dtype=torch.int64) for _ in range(2))
    rows = []
    for i, x in enumerate(found):
        at = longest - len(x.ids) if i % 2 else 0
        end = at + len(x.ids)
        ids[i, at:end], mask[i, at:end] = torch.tensor(x.ids), 1
        rows.append(torch.arange(end - len(x.tokens) - 1, end - 1) + i * longest)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return inputs, torch.cat(rows), torch.cat([torch.tensor(x.tokens) for x in found])


def scored(model, found, **options):
    """The log-probabilities of the samples' tokens, from logits."""
    inputs, rows, drawn = batch(found)
    return rlkernel.logprob(model(**inputs).logits.flatten(0, 1)[rows], drawn, **options).logprobs


def scored_from_hidden(model, found):
    inputs, rows, drawn = batch(found)
    hidden, weight = model.model(**inputs).last_hidden_state.flatten(0, 1)[rows], model.lm_head.weight
    return rlkernel.linear_logprob(hidden, weight, drawn, logits_dtype=hidden.dtype).logprobs


def differences(model, found, mode=True, score=scored, **options):
    reported = torch.cat([x.logprobs for x in found])
    with rlkernel.batch_invariant() if mode else contextlib.nullcontext(), torch.no_grad():
        return (score(model, found, **options) - reported).abs()


def engine(path, dtype, make=engines.in_process, **options):
    return make(path, dtype=str(dtype).removeprefix("torch."), **ENGINE | options)
