"""TRL's real trainers, stock and under rlkernel.patch_trl(): the same training, no trace afterwards."""

import pytest
import tiny
import torch
import trl_places
from trl_places import HEAD, trl

import rlkernel

nothing_left_behind = trl_places.nothing_left_behind

STEPS = 5
SCALARS = ("loss", "grad_norm", "reward", "kl", "entropy", "rewards/chosen", "logps/chosen")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A path, because trainers load the reference model from where the policy came from."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(model_path, tmp_path):
    from datasets import Dataset

    numbers = range(32)
    prompts = [f"what is {i} plus {i + 1}?" for i in numbers]
    data = {
        "prompt": {"prompt": prompts},
        "preference": {
            "prompt": prompts,
            "chosen": [f" it is {2 * i + 1}." for i in numbers],
            "rejected": [" no idea, sorry."] * 32,
        },
        "text": {"text": [f"what is {i}? it is {i}." for i in numbers]},
        "label": {
            "prompt": prompts,
            "completion": [f" it is {i}." for i in numbers],
            "label": [i % 2 == 0 for i in numbers],
        },
    }

    def train(name="GRPO", steps=STEPS, dataset="prompt", callbacks=(), **options):
        """Losses and metrics of every step, and the weights after the last."""
        settings = {
            **tiny.TRAINING,
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 8 if dataset == "prompt" else 4,
            "max_steps": steps,
            **options,
        }
        if dataset == "prompt":
            settings = {"num_generations": 4, "max_completion_length": 16, "beta": 0.04, **settings}
        trainer = getattr(trl, f"{name}Trainer")(
            model=model_path,
            args=getattr(trl, f"{name}Config")(**settings),
            train_dataset=Dataset.from_dict(data[dataset]),
            processing_class=tiny.make_tokenizer(),
            **({"reward_funcs": tiny.reward} if dataset == "prompt" else {}),
            callbacks=list(callbacks),
        )
        trainer.train()
        history = [
            {k: float(x[k]) for k in SCALARS if k in x} for x in trainer.state.log_history if "loss" in x
        ]
        assert len(history) == steps
        return history, {k: x.clone() for k, x in trainer.model.state_dict().items()}

    return train


def assert_same_training(ours, theirs, metric, weight):
    for step, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            limit = metric * max(1, abs(other[key]))
            assert abs(value - other[key]) <= limit, f"step {step}: {key} {value} instead of {other[key]}"
    apart = max((ours[1][k] - x).abs().max().item() for k, x in theirs[1].items())
    assert apart <= weight, f"weights differ by {apart:.1e}"


def test_grpo_trains_the_same_and_undo_leaves_no_trace(train):
    stock = train()
    with rlkernel.patch_trl() as patch:
        patched = train()
    assert patch.calls == {HEAD: 2 * STEPS} and not patch.fallbacks  # policy and reference
    assert_same_training(patched, stock, 1e-5, 1e-5)
    again = train()
    assert again[0] == stock[0] and all(torch.equal(again[1][k], x) for k, x in stock[1].items())


@pytest.mark.parametrize(
    "options, passes, metric, weight",
    [
        ({"num_iterations": 2}, None, 1e-5, 1e-5),  # old, reference and policy passes
        ({"temperature": 0.7, "entropy_coef": 0.01, "beta": 0.0}, 1, 1e-5, 1e-5),  # entropy carries gradient
        ({"gradient_checkpointing": True}, 2, 1e-5, 1e-5),
        ({"bf16": True}, 2, 3e-2, 4e-3),  # rounding of bf16, which TRL's logits have and rlkernel's do not
    ],
    ids=["num_iterations", "temperature-entropy", "gradient_checkpointing", "bf16"],
)
def test_grpo_variants(train, options, passes, metric, weight):
    stock = train(**options)
    with rlkernel.patch_trl() as patch:
        patched = train(**options)
    assert patch.calls[HEAD] and not patch.fallbacks
    assert passes is None or patch.calls == {HEAD: passes * STEPS}
    assert_same_training(patched, stock, metric, weight)


def test_patch_comes_and_goes_during_training(train):
    from transformers import TrainerCallback

    class OnlyThirdStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                self.patch = rlkernel.patch_trl()

        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                self.patch.undo()

    only_third = OnlyThirdStep()
    mixed = train(callbacks=[only_third])
    assert only_third.patch.calls == {HEAD: 2} and not only_third.patch.active
    assert_same_training(mixed, train(), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "name, dataset, steps, calls, weight",
    [
        ("RLOO", "prompt", 3, 9, 1e-5),  # policy, old and reference
        ("DPO", "preference", 3, 6, 1e-5),  # policy and reference
        ("KTO", "label", 3, 12, 3e-5),  # and the KL pairs; Adam makes steps of gradients that nearly cancel
        ("SFT", "text", 3, 3, 1e-5),
    ],
)
def test_other_trainers(train, name, dataset, steps, calls, weight):
    stock = train(name, steps, dataset)
    with rlkernel.patch_trl() as patch:
        patched = train(name, steps, dataset)
    assert patch.calls == {HEAD: calls} and not patch.fallbacks
    assert_same_training(patched, stock, 1e-5, weight)
