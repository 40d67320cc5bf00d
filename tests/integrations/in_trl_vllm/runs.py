"""Ten steps of TRL's GRPOTrainer over vLLM on a CPU, and what each of them saw."""

import functools
from dataclasses import dataclass, field

import engines
import pytest
import tiny
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

STEPS = 10
PROMPTS = [f"what is {i} plus {i + 1}?" for i in range(32)]
DIFFERENCE, RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"


def reward(completion_ids, **_):
    """The share of even tokens, which any model learns to say."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@dataclass
class Run:
    log: list = field(default_factory=list)  # TRL's own, one a step
    rollouts: list = field(default_factory=list)  # what the engine answered
    synced: list = field(default_factory=list)  # of the weights before and after each update of the engine
    weights: dict = field(default_factory=dict)  # the trainer's, at the end
    calls: dict = field(default_factory=dict)
    differences: list = field(default_factory=list)  # of each pass: of its tokens, against the rollout

    def column(self, name):
        return [entry[name] for entry in self.log if name in entry]


def train(model, out, generation=None, own_sync=False, dtype="float32", base=GRPOTrainer, **options):
    """Ten steps, of an engine of TRL's making, of a ``dtype``, or of ``generation`` in its place.

    ``own_sync`` has TRL send the weights as it does."""
    run = Run()
    with pytest.MonkeyPatch.context() as here:
        on_a_cpu(here, run, own_sync, dtype)
        if generation is not None:
            here.setattr("trl.trainer.grpo_trainer.VLLMGeneration", generation)
        trainer = make_trainer(model, out, compared(base, run), **options)
        try:
            trainer.train()
        finally:
            if hasattr(trainer.vllm_generation, "llm"):
                engines.shut_down(trainer.vllm_generation.llm)
    run.log = [entry for entry in trainer.state.log_history if "loss" in entry]
    run.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return run


def compared(base, run):
    """A trainer whose scores of samples are compared with what the engine said of their tokens."""

    class Compared(base):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, length, *args, **named):
            out = super()._get_per_token_logps_and_entropies(model, ids, mask, length, *args, **named)
            answers = zip(*run.rollouts[-1][:3], strict=True) if run.rollouts else ()
            said = {(*prompt, *tokens): torch.tensor(logprobs)[:, 0] for prompt, tokens, logprobs in answers}
            for sample, there, scores in zip(ids, mask.bool(), out[0].detach(), strict=True):
                if (logprobs := said.get(tuple(sample[there].tolist()))) is not None:
                    run.differences.append((scores[: len(logprobs)] - logprobs).abs())
            return out

    return Compared


def make_trainer(model, out, base=GRPOTrainer, prompts=PROMPTS, **options):
    settings = {
        **tiny.TRAINING, "learning_rate": 3e-5, "output_dir": str(out), "per_device_train_batch_size": 16,
        "num_generations": 8, "max_completion_length": 16, "max_steps": STEPS, "beta": 0.0,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, **options,
    }  # fmt: skip
    config = RLOOConfig if issubclass(base, RLOOTrainer) else GRPOConfig
    return base(
        model=model, args=config(**settings), reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tiny.make_tokenizer(),
    )  # fmt: skip


def on_a_cpu(here, run, own_sync, dtype):
    """What vLLM wants on a CPU, which TRL has no options for.

    There vLLM packs the weights of its layers when it has loaded them and frees what it packed, so that one
    that TRL loads alone has no place to go to: all of them are loaded at once, by vLLM's own function.
    """
    generate = VLLMGeneration.generate

    def sync_weights(self):
        named = [(name, p.detach().clone()) for name, p in self._iter_named_params()]
        before = same_bits(self, named)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self.llm.reset_prefix_cache()
        run.synced.append((before, same_bits(self, named)))

    def generate_and_remember(self, *args, **named):
        self.logprobs = self.logprobs or 0  # which RLOO does not ask for
        run.rollouts.append(generate(self, *args, **named))
        return run.rollouts[-1]

    sizes = {name: engines.SIZES[name] for name in ("enforce_eager", "block_size")} | {"dtype": dtype}
    here.setattr(vllm_generation, "LLM", functools.partial(vllm_generation.LLM, **sizes))
    if not own_sync:
        here.setattr(VLLMGeneration, "sync_weights", sync_weights)
    here.setattr(VLLMGeneration, "generate", generate_and_remember)


def same_bits(generation, named):
    """Of the weights that vLLM keeps as they are, which are the trainer's to the bit."""
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    theirs = {name: p for name, p in runner.model.named_parameters() if p.numel()}
    return {name: torch.equal(theirs[name], p) for name, p in named if name in theirs}


class Replay:
    """In the place of an engine: what another one has answered."""

    def __init__(self, rollouts):
        self.rollouts = iter(rollouts)

    def __call__(self, **_):
        return self

    def sync_weights(self):
        pass

    def generate(self, prompts, **_):
        answer = next(self.rollouts)
        assert answer[0] == prompts
        return answer
