"""Engines of a small model, and what they are asked."""

import gc
import os
import random

import tiny

VOCAB = 512
SIZES = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 192,
    "max_num_seqs": 24,
    "seed": 0,
    "block_size": 32,
    "disable_log_stats": True,
    "max_logprobs": -1,
    "kv_cache_memory_bytes": 2**26,  # and not a share of a memory that others use too
}


def save_model(path):
    """Heads of 64, which vLLM's CPU kernels want, and logits that differ enough for filters to matter."""
    model = tiny.make_model(vocab=VOCAB, hidden=256)
    model.lm_head.weight.data *= 8
    model.save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    return str(path)


def in_process(model, **options):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(model=model, distributed_executor_backend="uni", **(SIZES | options))


def worker_processes(model, **options):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    return LLM(model=model, **(SIZES | options))


def shut_down(llm):
    """End an engine; in this process no other may live, for they share what is torn down."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def prompts(count, seed=0, shortest=3, longest=90):
    draw = random.Random(seed)
    return [
        {"prompt_token_ids": [draw.randrange(4, 46) for _ in range(draw.randint(shortest, longest))]}
        for _ in range(count)
    ]


def mixed(count, seed=0, seeded=False, **always):
    """Sampling parameters of all kinds, with several kinds in one request."""
    from vllm import SamplingParams

    draw = random.Random(seed)
    made = []
    for i in range(count):
        options = {
            "temperature": draw.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.5]),
            "max_tokens": draw.randint(1, 12),
            "ignore_eos": draw.random() < 0.5,
        }
        if options["temperature"]:
            options |= {
                "top_k": draw.choice([0, 0, 1, 5, 50]),
                "top_p": draw.choice([1.0, 1.0, 0.9, 0.5]),
                "min_p": draw.choice([0.0, 0.0, 0.1]),
            }
        if seeded:
            options["seed"] = 1000 + i
        if draw.random() < 0.3:
            options |= {
                "repetition_penalty": draw.choice([1.0, 1.3, 0.8]),
                "frequency_penalty": draw.choice([0.0, 0.5]),
                "presence_penalty": draw.choice([0.0, -0.4]),
            }
        if draw.random() < 0.2:
            options["logit_bias"] = {draw.randrange(VOCAB): draw.choice([-100, -3, 5]) for _ in range(3)}
        if draw.random() < 0.15:
            options["allowed_token_ids"] = sorted({draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))})
        if draw.random() < 0.2:
            options |= {"min_tokens": min(4, options["max_tokens"]), "stop_token_ids": [7, 8, 9]}
        if draw.random() < 0.2:
            options["bad_words"] = ["a", "b c"]
        if draw.random() < 0.6:
            options["logprobs"] = draw.choice([0, 1, 5, -1])
        made.append(SamplingParams(**(options | always)))
    return made


def tokens(outputs):
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
