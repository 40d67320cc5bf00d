"""A rollout and its trainer: is the log-probability of a sampled token the same number on both sides?

    python examples/zero_kl.py             # a Qwen3 of four layers, bf16, five optimiser steps: half a minute
    python examples/zero_kl.py --short     # a smaller one: seconds
    python examples/zero_kl.py --vllm      # vLLM samples (on a CPU), transformers trains

In each step the model samples completions of prompts of mixed lengths, token by token behind a KV cache. The
trainer then computes the log-probabilities of the same tokens from whole sequences, in micro-batches, as the
ratio of its loss wants them, and takes a step of AdamW. The weights are the same, so the two should be the
same number. With torch's kernels as they are they are not; inside `rlkernel.batch_invariant()` they are, to
the bit: the ratio is 1 and the KL divergence of rollout and trainer 0. Nothing else differs between the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import rlkernel

VOCABULARY = 2048
MICRO = 2  # sequences of a micro-batch of the trainer
MODES = ("default", "batch_invariant")
Rollout = Callable[[Any, list[list[int]]], tuple[list[list[int]], torch.Tensor]]


def make_model(layers: int, dtype: torch.dtype) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        max_position_embeddings=512,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():  # and not the rotary frequencies, which stay fp32 in every trainer
        parameter.data = parameter.data.to(dtype)
    return model


def batch(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, T], padded on the left or on the right."""
    longest = max(map(len, rows))

    def padded(row: list[int], value: list[int]) -> list[int]:
        padding = [0] * (longest - len(row))
        return padding + value if left else value + padding

    ids = torch.tensor([padded(row, row) for row in rows])
    return ids, torch.tensor([padded(row, [1] * len(row)) for row in rows])


class Transformers:
    """The model samples for itself: `generate`, with its KV cache."""

    def __init__(self, model: Any, new: int) -> None:
        self.new = new

    @torch.no_grad()
    def __call__(self, model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
        """Completions, and the log-probability of each of their tokens [B, new]."""
        ids, mask = batch(prompts, left=True)
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            min_new_tokens=self.new,
            max_new_tokens=self.new,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        drawn = found.sequences[:, ids.shape[1] :]
        scores = [rlkernel.logprob(logits, drawn[:, i]).logprobs for i, logits in enumerate(found.logits)]
        return drawn.tolist(), torch.stack(scores, 1)


class Vllm:
    """vLLM's engine samples, and is given the trainer's weights before each step."""

    def __init__(self, model: Any, new: int) -> None:
        from vllm import LLM, SamplingParams

        with tempfile.TemporaryDirectory(prefix="zero-kl-") as folder:
            model.save_pretrained(folder)
            self.llm = LLM(
                folder,
                skip_tokenizer_init=True,
                enforce_eager=True,
                distributed_executor_backend="uni",
                max_model_len=256,
                max_num_batched_tokens=64,  # long prompts come in chunks
                max_num_seqs=16,
                block_size=32,
                kv_cache_memory_bytes=2**27,
                disable_log_stats=True,
            )
        self.params = SamplingParams(
            temperature=1.0, max_tokens=new, logprobs=1, ignore_eos=True, detokenize=False
        )
        self.first = True

    def __call__(self, model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
        if not self.first:
            weights = [(name, parameter.data) for name, parameter in model.named_parameters()]
            self.llm.apply_model(lambda engine: engine.load_weights(weights) and None)
            self.llm.reset_prefix_cache()  # of the weights before
        self.first = False
        found = self.llm.generate([{"prompt_token_ids": p} for p in prompts], self.params, use_tqdm=False)
        samples = [request.outputs[0] for request in found]
        scores = [
            [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            for sample in samples
        ]
        return [list(sample.token_ids) for sample in samples], torch.tensor(scores)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def train_logprobs(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> torch.Tensor:
    """Of the completions' tokens [B, new], from whole sequences that are padded on the right."""
    ids, mask = batch([p + c for p, c in zip(prompts, completions, strict=True)], left=False)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    scores = rlkernel.logprob(logits, ids[:, 1:]).logprobs
    new = len(completions[0])
    return torch.stack([row[len(p) - 1 : len(p) - 1 + new] for row, p in zip(scores, prompts, strict=True)])


def steps(mode: str, args: argparse.Namespace) -> list[Any]:
    """A report of each optimiser step."""
    model = make_model(args.layers, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    with contextlib.ExitStack() as stack:
        if mode == "batch_invariant":
            stack.enter_context(rlkernel.batch_invariant())
            if args.vllm:
                ops = ("sampler", "attention")
                stack.enter_context(rlkernel.patch_vllm(ops=ops, batch_invariant=True))
        rollout = (Vllm if args.vllm else Transformers)(model, args.new)
        if isinstance(rollout, Vllm):
            stack.callback(rollout.close)
        reports = []
        # stock vLLM on a CPU packs its weights away and takes no new ones
        for _ in range(1 if args.vllm and mode == "default" else args.steps):
            prompts = [
                torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in args.prompts
            ]
            completions, old = rollout(model, prompts)
            new = torch.cat(
                [
                    train_logprobs(model, prompts[i : i + MICRO], completions[i : i + MICRO])
                    for i in range(0, len(prompts), MICRO)
                ]
            )
            reports.append(rlkernel.consistency.compare(new.detach(), old))
            advantages = torch.linspace(-1, 1, len(prompts))[:, None]
            (-(new - old).exp() * advantages).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return reports


def run(args: argparse.Namespace) -> dict[str, list[Any]]:
    torch.set_num_threads(args.threads)
    if args.vllm:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    return {mode: steps(mode, args) for mode in MODES}


def show(found: dict[str, list[Any]]) -> None:
    print(
        f"{'step':>4}"
        + "".join(f"  {mode + ': max |difference|':>35}{'KL':>10}{'equal':>9}" for mode in found)
    )
    for i in range(max(map(len, found.values()))):
        line = f"{i + 1:>4}"
        for reports in found.values():
            if i < len(reports):
                r = reports[i]
                far, kl = (f"{x:.1e}" if x else "0" for x in (r.max_abs_difference, r.kl.k3))
                line += f"  {far:>35}{kl:>10}{f'{r.equal}/{r.tokens}':>9}"
            else:
                line += f"  {'':>54}"
        print(line)
    if all(report.identical for report in found["batch_invariant"]):
        tokens = sum(report.tokens for report in found["batch_invariant"])
        print(f"Under batch_invariant all {tokens} log-probabilities are the same number: ratio 1, KL 0.")
    else:
        print("Under batch_invariant log-probabilities differ: that should not be.")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    from before_after import checked

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="two layers, two steps, few tokens")
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM's engine for CPUs")
    parser.add_argument("--steps", type=int, help="of the optimiser (default 5; 2 with --short)")
    parser.add_argument("--layers", type=int, help="of the model (default 4; 2 with --short)")
    parser.add_argument("--new", type=int, help="tokens of a completion (default 24; 6 with --short)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 5, 17, 40, 64, 100], help="lengths")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=1)
    args = checked(parser, parser.parse_args(arguments))
    args.steps = args.steps or (2 if args.short else 5)
    args.layers = args.layers or (2 if args.short else 4)
    args.new = args.new or (6 if args.short else 24)
    return args


def main() -> None:
    from before_after import need

    args = parse()
    need("transformers", *(["vllm"] if args.vllm else []))
    found = run(args)
    show(found)
    raise SystemExit(not all(report.identical for report in found["batch_invariant"]))


if __name__ == "__main__":
    main()
