"""A PPO step of a DeepSpeed engine: logprobs by its logits, as DeepSpeed-Chat makes them, and by score().

    python examples/deepspeed_step.py                                  # a minute
    python examples/deepspeed_step.py --stage 3 --vocabulary 65536
    python examples/deepspeed_step.py --json result.json               # every figure, step by step

The engine is DeepSpeed's, on one rank over gloo; the model is a random Qwen2, made on the spot; the sequences
are random and the same in both runs, each of which has a process of its own. A step is the engine's call, the
logprobs, the clipped loss, ``engine.backward`` and ``engine.step``.
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

from before_after import MIB, PeakMemory

MODES = ("stock", "score")


def train(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps in this process. Returns what it measured, step by step."""
    import deepspeed
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import rlkernel
    from rlkernel.integrations import deepspeed as adapter

    torch.set_num_threads(args.threads)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # one rank exchanges nothing
    store = f"file://{args.folder / mode}.store"
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, verbose=False, rank=0, world_size=1, init_method=store
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64, tie_word_embeddings=True,
        )
    )  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": args.samples,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    g = torch.Generator().manual_seed(1)
    record: dict[str, Any] = {"step_seconds": [], "cpu_seconds": [], "peak_bytes": [], "loss": []}
    peak = PeakMemory()
    for _ in range(args.steps + 1):
        ids = torch.randint(3, args.vocabulary, (args.samples, args.length), generator=g)
        advantages = torch.randn(args.samples, args.length - 1, generator=g)
        mask = torch.ones_like(advantages)
        peak.start()
        begin = time.perf_counter(), time.process_time()
        if mode == "score":
            logprobs = adapter.score(engine, ids, use_cache=False).logprobs
            loss = rlkernel.policy_loss(logprobs, None, advantages, mask, loss_type="ppo").loss
        else:
            logp = torch.nn.functional.log_softmax(engine(ids, use_cache=False).logits[:, :-1, :], dim=-1)
            logprobs = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
            del logp
            ratio = (logprobs - logprobs.detach()).exp()
            losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            loss = (losses * mask).sum() / mask.sum()
        engine.backward(loss)
        engine.step()
        record["step_seconds"].append(time.perf_counter() - begin[0])
        record["cpu_seconds"].append(time.process_time() - begin[1])
        record["peak_bytes"].append(peak.stop())
        # the loss itself is the same whatever the policy, on-policy; this is not
        record["loss"].append(logprobs.detach().double().mean().item())
    return record


def run_apart(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """`train` in a fresh process, so that no run finds memory or caches of another."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(args.threads)}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", mode, "--folder", str(args.folder)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    record = json.loads((args.folder / f"{mode}.json").read_text())
    record["summary"] = {  # the first step warms caches up
        "step_seconds": statistics.median(record["step_seconds"][1:]),
        "cpu_seconds": statistics.median(record["cpu_seconds"][1:]),
        "peak_mib": max(record["peak_bytes"]) / MIB,
    }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="of ZeRO")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure, step by step, to this file")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"--json must name a file in a folder that is there, got {args.json}")
    if args.worker:
        record = train(args.worker, args)
        (args.folder / f"{args.worker}.json").write_text(json.dumps(record))
        return
    with tempfile.TemporaryDirectory(prefix="deepspeed-step-") as name:
        args.folder = Path(name)
        result: dict[str, Any] = {mode: run_apart(mode, args) for mode in MODES}
    pairs = zip(result["stock"]["loss"], result["score"]["loss"], strict=True)
    result["logprob_difference"] = max(abs(a - b) for a, b in pairs)
    result["settings"] = {k: v for k, v in vars(args).items() if isinstance(v, int | float)}
    from rlkernel.bench import example_tables, report

    head = report.header([], "cpu") | {"threads": args.threads}
    head["command"] = shlex.join(["python", "examples/deepspeed_step.py", *sys.argv[1:]])
    result = {"header": head, **result}
    print(example_tables.deepspeed_step(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
