"""rlkernel.patch_trl(prefix_sharing=True) with parameters spread over ranks, who must call equally often."""

import contextlib
import types

import pytest
import ranks
import tiny
import torch
import trl_prefix_cases
from trl_prefix_cases import (
    COMPLETION,
    METHOD,
    accelerate,
    assert_same_pass,
    make_model,
    one_pass,
    patch_trl,
    samples,
    trl,
)

from rlkernel.integrations import hf
from rlkernel.integrations.trl import passes

nothing_left_behind, trainer = trl_prefix_cases.nothing_left_behind, trl_prefix_cases.trainer
pytestmark = ranks.pytestmark

SHORT, HALF_EMPTY = (2, 1, 0, 1, 2, 1, 1, 0), (6, 3, 5, 1, 0, 0, 0, 0)


def with_a_hole(ids, mask):
    mask = mask.clone()
    mask[0, -COMPLETION + 1] = 0
    return ids, mask


# for each, what the two ranks have, and how many of their samples TRL runs at once
SCENARIOS = {
    "parts of different number": ((samples(SHORT), samples()), 2),
    "one rank is left to TRL": ((samples(SHORT), with_a_hole(*samples(seed=1))), 2),
    "samples without tokens": ((samples(HALF_EMPTY), samples(seed=1)), 3),
    "one pass": ((samples(SHORT), samples(seed=1)), None),
}


# One process that is told its model is sharded: how often it calls


def badly_filling():
    """Four groups of two samples of which no two fit where TRL has three samples."""
    ids = torch.randint(3, 211, (8, 1 + COMPLETION), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(8) // 2 + 3
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize(
    "inputs, chunk",
    [(samples(), 2), (samples(SHORT), 2), (samples(SHORT), 1), (samples(HALF_EMPTY), 3), (samples(), 8),
     (badly_filling(), 3)],
)  # fmt: skip
def test_as_many_passes_as_trl(trainer, monkeypatch, inputs, chunk):
    model = make_model()
    counted = ranks.calls_of(model)
    scores = getattr(trl.GRPOTrainer, METHOD)
    with torch.no_grad():
        stock = scores(trainer, model, *inputs, COMPLETION, chunk, compute_entropy=True)
        theirs, limit = len(counted), chunk * inputs[0].shape[1]
        rows = []
        run = passes._run
        monkeypatch.setattr(
            passes, "_run", lambda call, part, s: rows.append(part.total) or run(call, part, s)
        )
        monkeypatch.setattr(hf, "is_sharded", lambda model: True)
        with patch_trl(prefix_min_ratio=1) as patch:
            packed = getattr(trl.GRPOTrainer, METHOD)(
                trainer, model, *inputs, COMPLETION, chunk, compute_entropy=True
            )
    assert not patch.fallbacks and len(counted) == 2 * theirs and max(rows) <= limit
    assert sum(n for n in rows if n > 1) < inputs[1].sum()
    assert_same_pass((packed[:2], {}), (stock[:2], {}))


def test_several_backward_passes_are_left_to_trl(trainer, monkeypatch):
    monkeypatch.setattr(hf, "is_sharded", lambda model: True)
    with patch_trl() as patch:
        one_pass(trainer, make_model(), *samples(), 2)
    reason = "the model is sharded, and its backward passes must be as many as on other ranks"
    assert patch.fallbacks == {f"{METHOD}: {reason}": 1}


# Two ranks


def _one_pass(model, kind, ids, mask, chunk):
    """What one_pass of trl_prefix_cases returns; without gradients where TRL runs several chunks."""
    accelerator = types.SimpleNamespace(
        unwrap_model=lambda m: m if kind.startswith("fsdp2") else m.module,
        autocast=contextlib.nullcontext,
        is_main_process=False,
        distributed_type=types.SimpleNamespace(value=kind),
    )
    trainer = types.SimpleNamespace(accelerator=accelerator, args=types.SimpleNamespace(report_to=[]))
    scores = getattr(trl.GRPOTrainer, METHOD)
    with torch.set_grad_enabled(chunk is None):
        logps, entropies, _ = scores(trainer, model, ids, mask, COMPLETION, chunk, compute_entropy=True)
    grads = {}
    if chunk is None:
        row = torch.linspace(-1, 1, logps.numel()).view_as(logps)
        loss = (logps * row).sum() + (entropies * row.flip(0)).sum()
        grads = ranks.gradients(model, kind, loss)
    return [logps.detach(), entropies.detach()], grads


def _trl_passes(rank, kind):
    """By scenario: how often the model was called, stock and packed, and what was left to TRL."""
    report = {}
    for name, (inputs, chunk) in SCENARIOS.items():
        model = ranks.wrap(make_model(), kind)
        counted = ranks.calls_of(model)
        stock = _one_pass(model, kind, *inputs[rank], chunk)
        theirs = len(counted)
        model = model if chunk else ranks.wrap(make_model(), kind)  # gradients add up
        counted = counted if chunk else ranks.calls_of(model)
        counted.clear()
        with patch_trl() as patch:
            packed = _one_pass(model, kind, *inputs[rank], chunk)
        assert_same_pass(packed, stock)
        assert (chunk is None) == bool(packed[1])
        report[name] = theirs, len(counted), dict(patch.fallbacks), patch.prefix.ratio
    return report


@pytest.mark.parametrize("kinds", ranks.kinds("fsdp1", "fsdp2", "fsdp2-head", "zero3"))
def test_trls_passes(kinds, tmp_path):
    """Values and gradients of stock TRL on the same ranks, where ranks differ in what they could pack."""
    for kind, reports in ranks.run(_trl_passes, kinds, tmp_path).items():
        for rank, report in enumerate(reports):
            for name, (theirs, ours, fallbacks, ratio) in report.items():
                left = name.startswith("one rank") and rank == 1
                assert theirs == ours, (kind, name)
                assert len(fallbacks) == left and (ratio == 1 if left else ratio > 2), (kind, name)


# The whole trainer


def _train(rank, kind, path):
    """Losses and gradient norms of a few steps, stock and packed, and what was left to TRL."""
    import warnings

    from datasets import Dataset

    warnings.simplefilter("ignore")
    ranks.accelerate_without_gpus()
    sharding = {
        "zero3": {"deepspeed": ranks.automatic_zero(3)},
        "fsdp2": {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
        },
    }[kind]
    settings = {
        **tiny.TRAINING, "use_cpu": False, "output_dir": f"{path}/out", "per_device_train_batch_size": 4,
        "num_generations": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.1,
        "max_completion_length": 8, "max_steps": 4, "optim": "adamw_torch",
    }  # fmt: skip
    words = ["say abc def ghi", "the quick brown fox jumps", "hello there", "one two three four five"]
    data = Dataset.from_dict({"prompt": words * 4})

    def reward(completions, **_):
        return [text.count("a") - 0.1 * len(text) for text in completions]

    def train():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        config = trl.GRPOConfig(**settings, **sharding)
        trainer = trl.GRPOTrainer(
            model=path, reward_funcs=reward, args=config, train_dataset=data,
            processing_class=tiny.make_tokenizer(),
        )  # fmt: skip
        trainer.train()
        steps = [row for row in trainer.state.log_history if "loss" in row]
        return [(row["loss"], row["grad_norm"]) for row in steps]

    stock = train()
    with patch_trl() as patch:
        packed = train()
    return stock, packed, dict(patch.fallbacks), patch.prefix.ratio


@pytest.mark.parametrize("kinds", ranks.kinds("zero3", "fsdp2", apart=True))
def test_training_is_that_of_stock_trl(kinds, tmp_path):
    """Generation, old and reference logprobs, two epochs over a batch: the real GRPOTrainer on two ranks."""
    tiny.make_model(vocab=len(tiny.make_tokenizer()), hidden=32).save_pretrained(tmp_path / "model")
    (reports,) = ranks.run(_train, kinds, tmp_path, str(tmp_path / "model")).values()
    for stock, packed, fallbacks, ratio in reports:
        assert not fallbacks and ratio > 2
        assert len(stock) == 4 and abs(stock[1][0]) > 1e-3
        torch.testing.assert_close(torch.tensor(packed), torch.tensor(stock), rtol=1e-5, atol=1e-6)
