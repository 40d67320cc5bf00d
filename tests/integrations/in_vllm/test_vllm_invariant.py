"""Two programs, one number: what vLLM's engine reports of a token is what transformers computes of it."""

import random
from types import SimpleNamespace

import engines
import pytest
import tiny
import torch
import transformers
from vllm import SamplingParams
from vllm.model_executor.layers.layernorm import RMSNorm

import rlkernel
from rlkernel.integrations.vllm import invariant_layers

OPS = ("sampler", "attention")
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
# prefills in chunks beside steps of others, and prefixes from the cache
ENGINE = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}


def saved(path, family, dtype):
    torch.manual_seed(0)
    options = {"head_dim": 64} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that are not all alike
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    return str(path)


def prompts():
    draw = random.Random(3)
    made = [[draw.randrange(3, 512) for _ in range(n)] for n in (1, 17, 70)]
    shared = [draw.randrange(3, 512) for _ in range(40)]
    return made + [[*shared, i, 7] for i in range(2)]


def rollout(engine, model, dtype, **options):
    params = SamplingParams(
        n=2, temperature=1.0, max_tokens=16, logprobs=1, ignore_eos=True, detokenize=False
    )
    llm = engine(model, dtype=str(dtype).removeprefix("torch."), **ENGINE, **options)
    try:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    finally:
        engines.shut_down(llm)
    return [
        (
            list(request.prompt_token_ids),
            list(sample.token_ids),
            torch.tensor(
                [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            ),
        )
        for request in found
        for sample in request.outputs
    ]


def differences(samples, path, dtype):
    """Of the tokens' log-probabilities, as a trainer scores padded batches, from logits and from the head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    longest = max(len(p) + len(c) for p, c, _ in samples)
    ids, mask = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(2))
    for i, (p, c, _) in enumerate(samples):
        at = longest - len(p) - len(c) if i % 2 else 0  # padded on the left, or on the right
        ids[i, at : at + len(p) + len(c)], mask[i, at : at + len(p) + len(c)] = torch.tensor(p + c), 1
    with rlkernel.batch_invariant(), torch.no_grad():
        hidden = model.model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).last_hidden_state
        found = []
        for i, (p, c, reported) in enumerate(samples):
            end = longest if i % 2 else len(p) + len(c)
            rows = hidden[i, end - len(c) - 1 : end - 1]
            ours = rlkernel.logprob(model.lm_head(rows), torch.tensor(c)).logprobs
            found.append((ours - reported).abs())
            weight = model.lm_head.weight
            fused = rlkernel.linear_logprob(rows, weight, torch.tensor(c), logits_dtype=dtype).logprobs
            found.append((fused - reported).abs())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "dtype", "engine"),
    [
        ("Qwen3", torch.bfloat16, engines.in_process),
        ("Qwen2", torch.float32, engines.worker_processes),
        ("Llama", torch.bfloat16, engines.worker_processes),
    ],
    ids=["Qwen3 bf16 in process", "Qwen2 fp32 in a worker process", "Llama bf16 in a worker process"],
)
def test_the_difference_is_exactly_zero(family, dtype, engine, tmp_path):
    path = saved(tmp_path, family, dtype)
    with rlkernel.patch_vllm(ops=OPS, batch_invariant=True, strict=True):
        assert rlkernel.batch_invariant.is_enabled()
        samples = rollout(engine, path, dtype)
    assert not rlkernel.batch_invariant.is_enabled()
    found = differences(samples, path, dtype)
    assert len(found) == 2 * 10 * 16 and found.max() == 0, f"{int((found > 0).sum())} of {len(found)} differ"


def test_one_layer_of_vllms_own_is_seen(tmp_path, monkeypatch):
    """A mutant: the sum of the residual is normalised before it is rounded."""
    native = RMSNorm.forward_native
    monkeypatch.setattr(invariant_layers, "_normed", lambda self, x, residual=None: native(self, x, residual))
    path = saved(tmp_path, "Qwen3", torch.bfloat16)
    with rlkernel.patch_vllm(ops=OPS, batch_invariant=True, strict=True):
        samples = rollout(engines.in_process, path, torch.bfloat16)
    assert differences(samples, path, torch.bfloat16).max() > 0


def config(enforce_eager=True, world_size=1, lora=None):
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=enforce_eager),
        parallel_config=SimpleNamespace(world_size=world_size),
        lora_config=lora,
    )


def test_what_is_not_covered_is_refused_by_name():
    reason = invariant_layers._config_reason
    assert reason(config()) == ""
    assert "enforce_eager=True" in reason(config(enforce_eager=False))
    assert "one process" in reason(config(world_size=2))
    assert "LoRA" in reason(config(lora=object()))

    class FusedMoE(torch.nn.Module):
        __module__ = "vllm.model_executor.layers.fused_moe"
        quant_method = object()

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), FusedMoE())
    assert invariant_layers._strange(model) == ["FusedMoE", "object"]

    class Runner:
        vllm_config = config()

    runner = Runner()
    runner.model = model
    with pytest.raises(ValueError, match="got a model with FusedMoE, object"):
        invariant_layers._checked(lambda self, dummy: None)(runner)
