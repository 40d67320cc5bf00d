"""A rollout in vLLM, and log-probabilities of prompts: vLLM by itself, and after rlkernel.patch_vllm().

    python examples/vllm_rollout.py                                    # two minutes
    python examples/vllm_rollout.py --vocabulary 151936 --samples 16
    python examples/vllm_rollout.py --json result.json                 # every figure, run by run

The engine is vLLM's, in one process on a CPU; the model is a random Qwen2, made on the spot; the prompts are
random and the same in both runs, each of which has a process of its own. A rollout draws samples of each
prompt with top-p, top-k and the log-probability of each token; scoring asks for ``prompt_logprobs`` of longer
prompts, which vLLM computes from the logits of a chunk of the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from before_after import MIB, PeakMemory, checked, need

MODES = ("stock", "patched")
WORK = ("rollout", "scoring")


def save_model(path: Path, args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64, max_position_embeddings=4096,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # logits that differ enough for a nucleus to be a part of the vocabulary
    model.save_pretrained(path)


def run(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of work in this process. Returns what it measured, run by run."""
    import torch
    from vllm import LLM, SamplingParams

    import rlkernel

    if mode == "patched":
        rlkernel.patch_vllm(strict=True)
    llm = LLM(
        model=str(args.folder / "model"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=args.scored + 8, max_num_batched_tokens=args.scored + 8, block_size=32, seed=0,
        max_num_seqs=args.prompts * args.samples, enable_prefix_caching=False, disable_log_stats=True,
        distributed_executor_backend="uni",
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)

    def prompts(count: int, length: int) -> list[Any]:
        ids = torch.randint(3, args.vocabulary, (count, length), generator=draw)
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    rollout = SamplingParams(
        n=args.samples, max_tokens=args.tokens, ignore_eos=True, temperature=0.9, top_p=0.95, top_k=1000,
        logprobs=0, detokenize=False,
    )  # fmt: skip
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    asked = {
        "rollout": (prompts(args.prompts, 32), rollout),
        "scoring": (prompts(args.prompts, args.scored), scoring),
    }
    peak = PeakMemory()
    record: dict[str, Any] = {f"{work}_{kind}": [] for work in WORK for kind in ("cpu", "peak")}
    for _ in range(args.runs + 1):
        for work, (given, parameters) in asked.items():
            peak.start()
            begin = time.process_time()
            outputs = llm.generate(given, parameters, use_tqdm=False)
            record[f"{work}_cpu"].append(time.process_time() - begin)
            record[f"{work}_peak"].append(peak.stop())
    record["scores"] = [
        next(iter(at.values())).logprob for output in outputs for at in output.prompt_logprobs[1:]
    ]
    llm.llm_engine.engine_core.shutdown()
    return record


def run_apart(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """`run` in a fresh process, so that no run finds memory or caches of another."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", mode, "--folder", str(args.folder)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    record = json.loads((args.folder / f"{mode}.json").read_text())
    record["summary"] = {}
    for work in WORK:  # the first run warms caches up
        record["summary"][f"{work}_cpu"] = statistics.median(record[f"{work}_cpu"][1:])
        record["summary"][f"{work}_mib"] = max(record[f"{work}_peak"][1:]) / MIB
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of each sample")
    parser.add_argument("--scored", type=int, default=512, help="tokens of a prompt that is scored")
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--runs", type=int, default=3, help="measured runs, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure, run by run, to this file")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = checked(parser, parser.parse_args())
    need("vllm")
    if args.worker:
        record = run(args.worker, args)
        (args.folder / f"{args.worker}.json").write_text(json.dumps(record))
        return
    with tempfile.TemporaryDirectory(prefix="vllm-rollout-") as name:
        args.folder = Path(name)
        save_model(args.folder / "model", args)
        result: dict[str, Any] = {mode: run_apart(mode, args) for mode in MODES}
    pairs = zip(*(result[mode].pop("scores") for mode in MODES), strict=True)
    result["logprob_difference"] = max(abs(a - b) for a, b in pairs)
    result["settings"] = {k: v for k, v in vars(args).items() if isinstance(v, int | float)}
    from rlkernel.bench import example_tables, report

    head = report.header([], "cpu") | {"threads": args.threads}
    head["command"] = shlex.join(["python", "examples/vllm_rollout.py", *sys.argv[1:]])
    result = {"header": head, **result}
    print(example_tables.vllm_rollout(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
