"""vLLM as the rollout and transformers as the trainer, where vLLM can be imported.

Each mode has an engine in a process of its own.  They work by turns, so that what else the machine does falls
on both.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import rlkernel
from rlkernel.bench.consistency import models
from rlkernel.bench.consistency.models import Sample, Sizes
from rlkernel.bench.consistency.pairs import MODES, Pairs, mode_named
from rlkernel.types import VllmOp

FAMILIES = ("Qwen3", "Qwen2", "Llama")
OPS: tuple[VllmOp, ...] = ("sampler", "attention")
SAMPLES, DECODED = 2, 32  # of each prompt; tokens of each request in a timed rollout
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def measured(family: str, dtype: torch.dtype, s: Sizes, seconds: float, least: int) -> dict[str, Any]:
    """A row of the report."""
    found: dict[str, Any] = {"family": family, "dtype": str(dtype)[6:]}
    model = models.made(family, dtype, s, "batch_invariant")
    with tempfile.TemporaryDirectory(prefix="consistency-") as folder, contextlib.ExitStack() as stack:
        model.save_pretrained(folder)
        engines = {mode: stack.enter_context(_engine(mode, dtype, Path(folder), s)) for mode in MODES}
        for mode, ask in engines.items():
            samples = [Sample(torch.tensor(ids), torch.tensor(x)) for ids, x in ask("rollout")]
            with mode_named(mode), torch.no_grad():
                score = _ours if mode == "batch_invariant" else models.log_softmax
                scores = models.scored(model, samples, score, packs=True)
            found[mode] = models.agreement(*scores)
        found["cost"] = {work: _pairs(engines, work, seconds, least).summary() for work in WORK}
    return found


def _ours(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return rlkernel.logprob(logits, ids).logprobs


def _pairs(engines: dict[str, Callable[[str], Any]], work: str, seconds: float, least: int) -> Pairs:
    found = Pairs([], [])
    for ask in engines.values():
        ask(work)  # fills caches
    began = time.perf_counter()
    while len(found.default) < least or time.perf_counter() - began < seconds:
        for mode in MODES if len(found.default) % 2 else reversed(MODES):
            getattr(found, mode).append(engines[mode](work))
    return found


@contextlib.contextmanager
def _engine(mode: str, dtype: torch.dtype, folder: Path, s: Sizes) -> Iterator[Callable[[str], Any]]:
    """A process that answers, until the block ends."""
    model = {"model": str(folder), "dtype": str(dtype)[6:]}  # vLLM's "auto" makes bf16 of fp32
    settings = json.dumps({"mode": mode, "sizes": s, "threads": torch.get_num_threads()} | model)
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "rlkernel.bench.consistency.engines", settings]
    with open(folder / f"{mode}.log", "w+") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        answers, questions = process.stdout, process.stdin

        def ask(question: str) -> Any:
            print(question, file=questions, flush=True)
            if not (answer := answers.readline()):
                log.seek(0)
                raise RuntimeError(f"vLLM's engine must answer, got its end:\n{log.read()[-3000:]}")
            return json.loads(answer)

        try:
            yield ask
        finally:
            questions.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            answers.close()


class Engine:
    """What a process answers with."""

    def __init__(self, model: str, dtype: str, s: Sizes) -> None:
        from vllm import LLM, SamplingParams

        self.s, self.params = s, SamplingParams
        self.draw = torch.Generator().manual_seed(3)
        self.llm = LLM(
            model=model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            distributed_executor_backend="uni",
            max_model_len=max(*s.prompts, s.cached, s.batch[1]) + max(s.new, DECODED) + 8,
            max_num_batched_tokens=max(32, s.batch[1]),  # so that prompts are prefilled in chunks
            max_num_seqs=24,
            enable_prefix_caching=True,
            block_size=32,
            kv_cache_memory_bytes=2**28,
            disable_log_stats=True,
            seed=0,
        )

    def rollout(self) -> list[tuple[list[int], list[float]]]:
        """Tokens, and log-probabilities of those that were drawn."""
        samples = []
        for request in self._generate([self._prompt(n) for n in self.s.prompts], self.s.new, n=SAMPLES):
            for sample in request.outputs:
                drawn = list(sample.token_ids)
                steps = zip(sample.logprobs, drawn, strict=True)
                samples.append(
                    ([*request.prompt_token_ids, *drawn], [step[token].logprob for step, token in steps])
                )
        return samples

    def prefill(self) -> float:
        rows, length = self.s.batch
        return self._seconds([self._prompt(length) for _ in range(rows)], 1)

    def decode(self, rows: int) -> float:
        return self._seconds([self._prompt(self.s.cached) for _ in range(rows)], DECODED)

    def _prompt(self, length: int) -> list[int]:
        return torch.randint(self.s.vocabulary, (length,), generator=self.draw).tolist()

    def _seconds(self, prompts: list[list[int]], new: int) -> float:
        began = time.process_time()
        self._generate(prompts, new)
        return time.process_time() - began

    def _generate(self, prompts: list[list[int]], new: int, n: int = 1) -> list[Any]:
        params = self.params(
            n=n, temperature=1.0, max_tokens=new, logprobs=1, ignore_eos=True, detokenize=False
        )
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


WORK: dict[str, Callable[[Engine], float]] = {
    "prefill": Engine.prefill,
    "rollout, 1 request": lambda engine: engine.decode(1),
    "rollout, 16 requests": lambda engine: engine.decode(16),
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    torch.set_num_threads(settings["threads"])
    if settings["mode"] == "batch_invariant":
        rlkernel.patch_vllm(ops=OPS, batch_invariant=True, strict=True)
    engine = Engine(settings["model"], settings["dtype"], Sizes(*settings["sizes"]))
    for line in sys.stdin:
        answer = engine.rollout() if line.strip() == "rollout" else WORK[line.strip()](engine)
        print(json.dumps(answer), file=answers, flush=True)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
