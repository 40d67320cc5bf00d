"""Decode steps of vLLM on a CPU whose requests share a prompt: vLLM's attention, and rlkernel's.

    python examples/vllm_attention.py                                  # six minutes
    python examples/vllm_attention.py --requests 8 --prompts 512 --heads 16/4
    python examples/vllm_attention.py --json result.json               # every figure, step by step

The engines, one after the other in one process, are of random Qwen2s, made on the spot, with heads of 64:
those of Qwen2.5-0.5B, and as many of keys and values as of queries. While requests are decoded the patch is
undone and applied again from step to step, so that steps of both kinds, which differ by a token, stand in
pairs. Measured is the CPU time of a step, and of the attention of all layers in it, with what is made once a
step for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from before_after import checked, need

MODES = ("stock", "patched")
BLOCK = 32
PLACES = 4224  # of the longest prompt and what is said behind it


def save_model(path: Path, heads: int, kv_heads: int, args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=2 * args.hidden, head_dim=64,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=PLACES,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)


class Clock:
    """The CPU time of functions that it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, cls: type, name: str) -> None:
        function = getattr(cls, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begin

        setattr(cls, name, timed)


class Engine:
    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        from vllm import LLM

        import rlkernel

        self.patch = rlkernel.patch_vllm(ops=("attention",), strict=True)
        from rlkernel.integrations.vllm import attention_cpu, attention_paged

        self.keys = attention_paged.READ, attention_paged.APART
        self.clock = Clock()
        self.clock.around(attention_cpu.CPU_ATTN.get_builder_cls(), "build")
        self.clock.around(attention_cpu.CPU_ATTN.get_impl_cls(), "forward")
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, dtype=args.dtype, enforce_eager=True, seed=0,
            max_model_len=PLACES, max_num_batched_tokens=PLACES, block_size=BLOCK, disable_log_stats=True,
            max_num_seqs=max(args.requests), kv_cache_memory_bytes=args.cache << 20,
            distributed_executor_backend="uni", async_scheduling=False,
        )  # fmt: skip
        self.args = args

    def shut_down(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def steps(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Pairs of decode steps of a request for each prompt."""
        from vllm import SamplingParams

        engine, pairs = self.llm.llm_engine, self.args.pairs
        prefill = SamplingParams(max_tokens=1, detokenize=False)
        self.llm.generate([{"prompt_token_ids": prompts[0]}], prefill, use_tqdm=False)  # into the cache
        asked = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * pairs + 16, detokenize=False)
        begun: set[str] = set()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{len(prompts)}-{len(prompt)}-{i}", {"prompt_token_ids": prompt}, asked)
        while len(begun) < len(prompts):
            begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        record: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        engine.step()  # warms up
        before = dict(self.patch.bytes)
        for i in range(2 * pairs):
            mode = MODES[(i + i // 2) % 2]  # which comes first changes from pair to pair
            if mode == "stock":
                self.patch.undo()
            self.clock.seconds = 0.0
            begin = time.process_time()
            engine.step()
            record[mode]["step"].append(time.process_time() - begin)
            record[mode]["attention"].append(self.clock.seconds)
            if mode == "stock":
                self.patch.apply()
        read, apart = (self.patch.bytes[key] - before.get(key, 0) for key in self.keys)
        while engine.has_unfinished_requests():
            engine.step()
        record["bytes"] = {"read": read, "apart": apart}
        return record


def summary(record: dict[str, Any]) -> dict[str, float]:
    """Medians in milliseconds, and the medians of the pairs' ratios."""
    found: dict[str, float] = {}
    for what in ("step", "attention"):
        stock, patched = (record[mode][what] for mode in MODES)
        found[f"{what}_ms_stock"] = 1e3 * statistics.median(stock)
        found[f"{what}_ms_patched"] = 1e3 * statistics.median(patched)
        found[f"{what}_ratio"] = statistics.median(a / b for a, b in zip(stock, patched, strict=True))
    read, apart = record["bytes"]["read"], record["bytes"]["apart"]
    found["fewer_bytes"] = apart / read if read else 1.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096], help="tokens that are shared")
    parser.add_argument("--apart", type=int, default=512, help="tokens of prompts that are not; 0: none")
    parser.add_argument("--pairs", type=int, default=12, help="of steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--heads", nargs="+", default=["14/2", "14/14"], help="of queries / of keys and values"
    )
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--cache", type=int, default=1280, help="MiB of keys and values")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure, step by step, to this file")
    args = checked(parser, parser.parse_args(), "apart")
    need("vllm")
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    import torch

    torch.set_num_threads(args.threads)
    draw = torch.Generator().manual_seed(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(3, args.vocabulary, (count, length), generator=draw).tolist()

    cases = [(count, length, True) for length in args.prompts for count in args.requests]
    cases += [(count, args.apart, False) for count in args.requests if args.apart]
    result: dict[str, Any] = {"cases": []}
    for shape in args.heads:
        with tempfile.TemporaryDirectory(prefix="vllm-attention-") as name:
            save_model(Path(name), *map(int, shape.split("/")), args)
            engine = Engine(Path(name), args)
        for count, length, shared in cases:
            given = prompts(1, length) * count if shared else prompts(count, length)
            record = engine.steps(given)
            case = {"heads": shape, "requests": count, "prompt": length, "shared": shared}
            result["cases"].append({**case, "summary": summary(record), **record})
            print(case, summary(record), file=sys.stderr)
        engine.shut_down()
    result["settings"] = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)}
    from rlkernel.bench import example_tables, report

    head = report.header([], "cpu") | {"threads": args.threads}
    head["command"] = shlex.join(["python", "examples/vllm_attention.py", *sys.argv[1:]])
    result = {"header": head, **result}
    print(example_tables.vllm_attention(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
