"""GRPO with rollouts of vLLM: what rollout and trainer say of the same token, stock and with rlkernel.

    python examples/grpo_vllm.py             # where TRL and vLLM are; on a CPU `make test-trl-vllm` makes
    python examples/grpo_vllm.py --short     # an environment with both, .venv-trl-vllm

TRL's GRPOTrainer with an engine of vLLM in its process (`vllm_mode="colocate"`), a small bf16 model that
learns to add, and rollouts with top-p. The two programs have the same weights, so before an update on a
sample the importance ratio of each of its tokens ought to be 1, and the KL of rollout and trainer 0. Under
stock TRL they are not: vLLM's log-probability is over the tokens that top-p has kept, TRL's over all, and the
two round differently. With `patch_trl(support=...)` the kept tokens travel with the samples. With
`batch_invariant=True` both programs compute the same bits, so far on a CPU alone, where that takes time; on a
GPU it is off, and the rounding remains.

Each run has a process of its own. The reward is 1 where the completion is the sum, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():  # before vLLM is imported
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile for longer than this runs
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }

import arithmetic
import before_after


@contextlib.contextmanager
def on_a_cpu(reload: bool) -> Any:
    """What TRL has no options for: an engine that is not compiled, and with `reload` weights that are loaded
    together, because vLLM packs them there and TRL loads them one by one."""
    from trl.generation import vllm_generation

    def sync_weights(self: Any) -> None:
        named = [(name, p.detach().clone()) for name, p in self._iter_named_params()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self.llm.reset_prefix_cache()

    owner, engine = vllm_generation.VLLMGeneration, vllm_generation.LLM
    theirs = owner.sync_weights
    vllm_generation.LLM = functools.partial(engine, enforce_eager=True, block_size=32)
    if reload:
        owner.sync_weights = sync_weights
    try:
        yield
    finally:
        vllm_generation.LLM, owner.sync_weights = engine, theirs


def compared(base: Any) -> Any:
    """A trainer that keeps what rollout and trainer say of each sampled token, before an update on it."""

    class Compared(base):
        def _prepare_inputs(self, batch: Any) -> Any:
            inputs = super()._prepare_inputs(batch)
            mask = inputs["completion_mask"].bool()
            pair = inputs["old_per_token_logps"][mask], inputs["sampling_per_token_logps"][mask]
            self.record.setdefault("pairs", []).append([x.float().tolist() for x in pair])
            return inputs

    Compared.__name__ = base.__name__
    return Compared


def train(mode: str, folder: Path, args: argparse.Namespace) -> Any:
    """One run in this process; the trainer, with what it has seen."""
    from trl import GRPOTrainer

    import rlkernel

    torch.set_num_threads(args.threads)
    on_gpu = torch.cuda.is_available()
    config = before_after.config(
        mode,
        folder,
        args,
        model_init_kwargs={"dtype": "bfloat16"},  # weights and products in the dtype of the engine
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.3,
        temperature=0.9,
        top_p=args.top_p,
        learning_rate=5e-4,
    )
    exact = mode == "patched" and args.batch_invariant
    with contextlib.ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(on_a_cpu(reload=not exact))
        if mode == "patched":
            stack.enter_context(before_after.bounded(args))
            patch = stack.enter_context(rlkernel.patch_trl(support=args.vocabulary, batch_invariant=exact))
        trainer = compared(before_after.measured(GRPOTrainer, mode, args))(
            model=str(folder),
            reward_funcs=arithmetic.correct_sum,
            args=config,
            train_dataset=arithmetic.dataset(args.largest),
            processing_class=arithmetic.make_tokenizer(),
        )
        stack.callback(trainer.vllm_generation.llm.llm_engine.engine_core.shutdown)
        trainer.train()
        if mode == "patched":
            trainer.record |= before_after.told(patch)
    pairs = zip(*trainer.record.pop("pairs"), strict=True)
    old, sampled = (torch.cat([torch.tensor(step) for step in side]) for side in pairs)
    report, ratio = rlkernel.consistency.compare(old[None], sampled[None]), (old - sampled).exp()
    trainer.record["rollout"] = {
        "tokens": report.tokens,
        "equal": report.equal,
        "max": report.max_abs_difference,
        "kl": report.kl.k3,
        "ratios": [ratio.min().item(), ratio.max().item()],
    }
    return trainer


def prepare(folder: Path, args: argparse.Namespace) -> float:
    """The model, in bf16."""
    from transformers import AutoModelForCausalLM

    start = before_after.warmed_up(folder, args)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    arithmetic.make_tokenizer().save_pretrained(folder)
    return start


def show(result: dict[str, Any]) -> None:
    titles = f"{'same number':>16} {'largest difference':>19} {'importance ratios':>20} {'KL':>9}"
    print(f"\n{'rollout and trainer':20} {titles}")
    for mode in before_after.MODES:
        r = result[mode]["rollout"]
        low, high = r["ratios"]
        print(
            f"{mode:20} {r['equal']:>7} of {r['tokens']:<5} {r['max']:>19.2g} "
            f"{f'{low:.4f} to {high:.4f}':>20} {r['kl']:>9.2g}"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = before_after.options(__doc__, steps=24, batch=288)
    parser.set_defaults(hidden=256, vocabulary=8192)  # heads of 64, which vLLM wants on a CPU
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument(
        "--batch-invariant", action=argparse.BooleanOptionalAction, default=not torch.cuda.is_available(),
        help="the same bits in rollout and trainer; on a CPU alone",
    )  # fmt: skip
    return before_after.parse(parser, arguments, **before_after.SHORT)


def main() -> None:
    args = parse()
    result = before_after.compare(args, train, prepare, needs=("trl", "vllm"))
    before_after.report(result, args)
    if result:
        show(result)


if __name__ == "__main__":
    main()
