"""The real GRPOTrainer and RLOOTrainer, stock and under patch_trl(prefix_sharing=True): the same training."""

import random
import types

import pytest
import tiny
import torch
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import METHOD, SHUFFLE, UPSTREAM, grpo_trainer, patch_trl, trl

from rlkernel.integrations.trl import order, training_step

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path = trl_trainers.model_path

STEPS = 4


@pytest.fixture
def train(model_path, tmp_path):
    from datasets import Dataset
    from transformers import TrainerCallback

    data = Dataset.from_dict({"prompt": trl_trainers.PROMPTS})

    def train(steps=STEPS, evaluate=False, algorithm="GRPO", **options):
        """What every step logged, its gradients, and the tokens that were sampled."""
        run = types.SimpleNamespace(history=[], grads=[], tokens=[])

        class Record(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **_):
                run.grads.append({name: p.grad.clone() for name, p in model.named_parameters()})

        class Trainer(getattr(trl, f"{algorithm}Trainer")):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                run.tokens.append(batch["completion_ids"])
                return batch

        settings = {
            **tiny.TRAINING,
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": steps,
            "beta": 0.04,
            "gradient_checkpointing": False,
            **options,
        }
        rollout = {"rollout_func": settings.pop("rollout")} if "rollout" in options else {}
        trainer = Trainer(
            model=model_path,
            args=getattr(trl, f"{algorithm}Config")(**settings),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            processing_class=tiny.make_tokenizer(),
            reward_funcs=tiny.reward,
            callbacks=[Record()],
            **rollout,
        )
        trainer.train()
        if evaluate:
            trainer.evaluate()
        run.history = [_measured(logs) for logs in trainer.state.log_history if "train_runtime" not in logs]
        return run

    return train


def _measured(logs):
    times = ("step_time", "runtime", "per_second", "num_tokens")
    return {key: float(x) for key, x in logs.items() if not key.endswith(times)}


def assert_same_training(ours, theirs, limit=2e-5):
    assert len(ours.history) == len(theirs.history) and len(ours.grads) == len(theirs.grads)
    for mine, other in zip(ours.tokens, theirs.tokens, strict=True):
        assert torch.equal(mine, other), "other tokens were sampled"
    for step, (mine, other) in enumerate(zip(ours.history, theirs.history, strict=True)):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            close = abs(value - other[key]) <= limit * max(1, abs(other[key])) or value != value
            assert close, f"step {step}: {key} {value} instead of {other[key]}"
    for step, (mine, other) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
        size = max(g.abs().max() for g in other.values())
        for name, grad in other.items():
            apart = (mine[name] - grad).abs().max() / size
            assert apart <= 10 * limit, f"step {step}: gradient of {name} differs by {apart:.1e}"


@pytest.mark.parametrize(
    "options, passes",
    [
        ({}, 2),  # policy and reference
        ({"beta": 0.0}, 1),
        ({"num_iterations": 2}, 2),  # of old and reference one for two steps each
        ({"gradient_checkpointing": True, "temperature": 0.7, "entropy_coef": 0.01}, 2),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5}, 2),
        ({"mask_truncated_completions": True, "max_completion_length": 24}, 2),
        ({"algorithm": "RLOO"}, 3),  # its old logprobs are always computed
        ({"algorithm": "RLOO", "num_iterations": 2, "learning_rate": 1e-4}, 2),
    ],
    ids=["beta", "no-beta", "num_iterations", "checkpointing", "sequence-level", "mask_truncated",
         "rloo", "rloo-num_iterations"],
)  # fmt: skip
def test_trains_the_same(train, options, passes):
    stock = train(**options)
    with patch_trl() as patch:
        packed = train(**options)
    assert patch.calls[METHOD] + patch.fallbacks[f"{METHOD}: no completion has a token"] == passes * STEPS
    assert patch.calls[METHOD] > 0 and not set(patch.fallbacks) - {f"{METHOD}: no completion has a token"}
    assert patch.prefix.ratio > 1.5 and patch.calls[SHUFFLE]
    assert_same_training(packed, stock)


def tool_calls(prompts, trainer):
    """Completions of any length, in which some tokens are those of a tool, and the sampler's logprobs."""
    tokenize = trainer.processing_class
    draw = random.Random(trainer.state.global_step)
    lengths = [draw.randint(1, 8) for _ in prompts]
    return {
        "prompt_ids": [tokenize(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [draw.choices(range(4, 40), k=length) for length in lengths],
        "logprobs": [[-3.5 - 0.1 * i for i in range(length)] for length in lengths],
        "env_mask": [[int(i % 3 != 1) for i in range(length)] for length in lengths],
    }


def test_tools_and_the_samplers_logprobs(train, monkeypatch):
    """Six samples a micro-batch cut groups of four; all that goes with a sample moves with it."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    options = {
        "rollout": tool_calls, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2,
        "num_iterations": 2, "off_policy_mask_threshold": 0.5,
    }  # fmt: skip
    with patch_trl() as patch:
        packed = train(**options)
    assert not patch.fallbacks and patch.prefix.ratio > 1.5
    with monkeypatch.context() as same:
        same.setattr(grpo_trainer, SHUFFLE, training_step.group_shuffle(UPSTREAM[SHUFFLE], patch.prefix))
        stock = train(**options)
    assert_same_training(packed, stock)


ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}


def test_steps_that_share_generations(train, monkeypatch):
    """Two optimiser steps, each of two micro-batches, for one generation: with TRL on the same shuffle."""
    with patch_trl() as patch:
        packed = train(**ACCUMULATED)
    assert not patch.fallbacks and patch.calls[METHOD] == STEPS * 2 + 2 * (
        4 + 1
    )  # policy; old by micro-batch, reference
    shuffle = training_step.group_shuffle(UPSTREAM[SHUFFLE], patch.prefix)
    with monkeypatch.context() as same:
        same.setattr(grpo_trainer, SHUFFLE, shuffle)
        stock = train(**ACCUMULATED)
    assert_same_training(packed, stock)


def test_accumulated_gradient_is_that_of_trls_shuffle(train):
    """All samples of a generation in one optimiser step: their order does not matter."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "loss_type": "grpo"}
    stock = train(1, **options)
    with patch_trl() as patch:
        packed = train(1, **options)
    assert not patch.fallbacks and patch.prefix.ratio > 1.5
    assert_same_training(
        types.SimpleNamespace(**vars(packed) | {"history": []}),
        types.SimpleNamespace(**vars(stock) | {"history": []}),
    )


def test_a_shuffle_that_separates_groups_shows(train, monkeypatch):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "beta": 0.0}
    with patch_trl() as patch:
        train(1, **options)
    together = patch.prefix.ratio
    for module in (order, training_step):
        monkeypatch.setattr(module, "by_groups", lambda permutation, prompts: permutation)
    with patch_trl(prefix_min_ratio=1) as patch:
        train(1, **options)
    assert together > 2 and patch.prefix.ratio < 0.8 * together


def test_evaluates_the_same(train):
    options = {"num_generations_eval": 2}
    stock = train(1, evaluate=True, **options)
    with patch_trl() as patch:
        packed = train(1, evaluate=True, **options)
    assert not patch.fallbacks and any("eval_loss" in logs for logs in packed.history)
    assert_same_training(packed, stock)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"bf16": True, "gradient_checkpointing": True},
        {"model_init_kwargs": {"dtype": "bfloat16"}, "cast_lm_head_to_fp32": True},
    ],
    ids=["autocast", "autocast-checkpointing", "fp32-head"],
)
def test_bf16(train, options):
    stock = train(2, **options)
    with patch_trl() as patch:
        packed = train(2, **options)
    assert patch.calls[METHOD] and not patch.fallbacks
    for mine, other in zip(packed.history, stock.history, strict=True):
        for key in ("loss", "entropy", "grad_norm"):
            assert abs(mine[key] - other[key]) <= 5e-3 * max(0.1, abs(other[key])), key


def test_rewards_rise_alike(train):
    """Twenty-four steps: the same tokens as long as the logprobs agree, and the same curve."""
    options = {"steps": 24, "per_device_train_batch_size": 16, "learning_rate": 3e-3, "beta": 0.0}
    stock = train(**options)
    with patch_trl() as patch:
        packed = train(**options)
    assert not patch.fallbacks
    curves = [torch.tensor([logs["reward"] for logs in run.history]) for run in (stock, packed)]
    gained = [curve[-6:].mean() - curve[:6].mean() for curve in curves]
    same = 0
    while same < 24 and torch.equal(stock.tokens[same], packed.tokens[same]):
        same += 1
    print(f"same tokens in {same} of 24 steps; rewards rose by {gained[0]:.3f} and {gained[1]:.3f}")
    assert torch.equal(curves[0][:same], curves[1][:same]) and same >= 6
    assert gained[0] > 0.1 and abs(gained[0] - gained[1]) <= 0.25 * gained[0]
