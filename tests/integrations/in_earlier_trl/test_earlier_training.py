"""Trainers of an earlier TRL, stock and under rlkernel.patch_trl(): the same logs and weights, no logits."""

import warnings

import earlier
import pytest
import tiny

import rlkernel

GROUPS = {"num_iterations": 2, "temperature": 0.7}
VOCABULARY = 2048
PREFERENCE = ["sigmoid", "sft"] if earlier.VERSION.release >= (1, 1) else "sigmoid"


@pytest.mark.parametrize(
    "algorithm, options, metric, weight",
    [
        ("GRPO", GROUPS, 2e-5, 2e-5),
        (
            "GRPO",
            {"bf16": True},
            3e-2,
            4e-3,
        ),  # rounding of bf16, which TRL's logits have and rlkernel's do not
        ("GRPO", {"gradient_checkpointing": True, "max_steps": 2}, 2e-5, 2e-5),
        ("RLOO", {}, 2e-5, 2e-5),
        ("DPO", {"loss_type": PREFERENCE}, 2e-5, 2e-5),
        ("DPO", {"ld_alpha": 0.5, "max_steps": 2}, 2e-5, 2e-5),
    ],
    ids=["grpo", "grpo-bf16", "grpo-checkpointing", "rloo", "dpo", "ld-dpo"],
)
def test_trains_the_same(model_path, algorithm, options, metric, weight):
    stock = earlier.trained(algorithm, model_path, **options)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained(algorithm, model_path, **options)
    assert patch.calls and not patch.fallbacks
    assert all(name.startswith(f"{algorithm}Trainer.") for name in patch.calls), patch.calls
    earlier.check_same(patched, stock, metric, weight)


def test_a_loss_that_has_the_padding(tmp_path):
    """LUSPO before TRL 1.10 adds up the tokens behind a completion, too, which only some losses here have."""
    path = tiny.save(tmp_path, vocab=len(tiny.make_tokenizer()))  # soon says its last token
    options = {"loss_type": "luspo", "max_steps": 2}
    stock = earlier.trained("GRPO", path, **options)
    assert any(step["completions/min_length"] < step["completions/max_length"] for step in stock[0])
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained("GRPO", path, **options)
    assert patch.calls[f"GRPOTrainer.{earlier.SCORES}"] and not patch.fallbacks
    earlier.check_same(patched, stock, weight=1e-4)
    with warnings.catch_warnings(), rlkernel.patch_trl(prefix_sharing=True) as patch:
        warnings.filterwarnings("ignore", message=".*LUSPO has the padding")
        packed = earlier.trained("GRPO", path, **options)
    assert bool(patch.fallbacks) == (earlier.VERSION.release < (1, 10))
    earlier.check_same(packed, stock, weight=1e-4)


def test_kto_trains_the_same(model_path):
    stock = earlier.trained("KTO", model_path)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained("KTO", model_path)
    assert not patch.fallbacks
    scored = patch.calls["KTOTrainer._compute_loss"]
    assert scored == (3 if earlier.VERSION.release >= (1, 9) else 0)
    earlier.check_same(patched, stock, 1e-4)


def test_a_reference_that_is_scored_before(model_path):
    """The reference runs in other batches than the policy: by rounding, ties of rewards fall either way."""
    if (1, 7) <= earlier.VERSION.release < (1, 9):
        return  # this TRL does not find what it has written
    stock = earlier.trained("DPO", model_path, precompute_ref_log_probs=True)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained("DPO", model_path, precompute_ref_log_probs=True)
    assert patch.calls["DPOTrainer.compute_ref_log_probs"] and not patch.fallbacks
    for log in (stock[0], patched[0]):
        log[0].pop("rewards/accuracies")
    earlier.check_same(patched, stock)


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_a_prompt_once_per_group(model_path, algorithm):
    stock = earlier.trained(algorithm, model_path, temperature=0.7)
    with rlkernel.patch_trl(prefix_sharing="require") as patch:
        patched = earlier.trained(algorithm, model_path, temperature=0.7)
    assert patch.prefix.ratio > 1.2 and not patch.fallbacks
    earlier.check_same(patched, stock)


def test_evaluation_logs_the_same(model_path):
    stock = earlier.make("DPO", model_path, per_device_eval_batch_size=2).evaluate()
    with rlkernel.patch_trl() as patch:
        ours = earlier.make("DPO", model_path, per_device_eval_batch_size=2).evaluate()
    assert patch.calls == {"DPOTrainer._compute_loss": 2} and not patch.fallbacks
    assert ours.keys() == stock.keys() and "eval_loss" in ours
    for name in stock:
        if not any(time in name for time in (*earlier.TIMES, "preparation")):
            assert ours[name] == pytest.approx(stock[name], rel=2e-5, abs=2e-5), name


@pytest.mark.parametrize("algorithm", ["GRPO", "DPO"])
def test_no_logits_are_made(model_path, algorithm):
    seen = []
    base = earlier.watched(getattr(earlier.trl, f"{algorithm}Trainer"), VOCABULARY, seen)

    def train():
        seen.clear()
        earlier.make(algorithm, model_path, base, per_device_train_batch_size=16).train()
        return max(seen)

    stock = train()
    assert stock >= 200
    with rlkernel.workspace.limited(2**20), rlkernel.patch_trl():  # which has room for tiles of 128 rows
        assert train() <= 128
