"""A top-p rollout in vLLM, scored by transformers with the tokens that the filter kept, and without them.

    python examples/vllm_support.py [--prompts 8] [--samples 4] [--tokens 32] [--top-p 0.8]

One random Qwen2, made on the spot, is the policy of both, so every importance ratio ought to be 1. The
engine, vLLM's on a CPU, hands out its log-probabilities (of what it drew from) and the kept tokens; the
trainer has hidden states and the lm_head, and never the logits.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile for longer than this runs
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from torch import Tensor

import rlkernel
from rlkernel.integrations.vllm import support_of


def policy(vocabulary: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # logits that differ enough for a nucleus to be a part of the vocabulary
    return model


def rollout(model: Any, args: argparse.Namespace) -> list[Any]:
    """What vLLM answers, with the support of each token."""
    from vllm import LLM, SamplingParams

    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, args.vocabulary, (args.prompts, args.prompt_tokens), generator=draw)
    parameters = SamplingParams(
        n=args.samples, max_tokens=args.tokens, temperature=args.temperature, top_p=args.top_p, seed=0,
        logprobs=0, detokenize=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, rlkernel.patch_vllm(return_support=args.support):
        model.save_pretrained(folder)
        llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="float32", logprobs_mode="processed_logprobs",
            max_model_len=512, block_size=32, enforce_eager=True, kv_cache_memory_bytes=2**28,
            distributed_executor_backend="uni",
        )  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": row} for row in ids.tolist()], parameters, use_tqdm=False
        )
        llm.llm_engine.engine_core.shutdown()
    return outputs


def padded(rows: list[list[Any]], dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=dtype)


def ratios(args: argparse.Namespace) -> tuple[dict[str, Tensor], Tensor]:
    """The importance ratio of each token by what the trainer knows, and how many tokens were kept for it."""
    model = policy(args.vocabulary)
    outputs = rollout(model, args)
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    targets = padded([list(sample.token_ids) for _, sample in samples], torch.int64)
    rolled = padded(
        [
            [step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True)]
            for _, sample in samples
        ],
        torch.float32,
    )
    support = support_of(outputs, length=targets.shape[1])

    prompts = torch.tensor([output.prompt_token_ids for output, _ in samples])
    with torch.no_grad():
        hidden = model.model(torch.cat((prompts, targets), 1)).last_hidden_state
    hidden = hidden[:, prompts.shape[1] - 1 : -1]  # behind which each target stands

    def ratio(**known: Any) -> Tensor:
        out = rlkernel.linear_logprob(
            hidden, model.lm_head.weight, targets, temperature=args.temperature, **known
        )
        return (out.logprobs - rolled).exp()[support.known].detach()

    every = {
        "without the support": ratio(),
        "with the support": ratio(support_ids=support.ids, support_offsets=support.offsets),
    }
    return every, support.offsets.diff().view_as(targets)[support.known]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    from before_after import checked

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each sample")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--support", type=int, default=2048, help="room for the kept tokens of one")
    return checked(parser, parser.parse_args(given))


def main() -> None:
    from before_after import need

    args = arguments()
    need("vllm")
    every, kept = ratios(args)
    print(f"{len(kept)} tokens, drawn from {kept.double().mean():.0f} kept ones in the mean")
    print(f"{'the trainer':20} {'mean ratio':>10} {'largest':>9} {'outside 1 +- 1e-4':>18}")
    for name, ratio in every.items():
        outside = ((ratio - 1).abs() > 1e-4).double().mean()
        print(f"{name:20} {ratio.mean():10.6f} {ratio.max():9.6f} {outside:18.1%}")


if __name__ == "__main__":
    main()
