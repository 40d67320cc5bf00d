"""Trainings of a tiny model by the TRL that is here, and what they logged."""

import tempfile

import tiny
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

VERSION = Version(trl.__version__)
SCORES = (
    "_full_logits_logps"
    if hasattr(trl.GRPOTrainer, "_full_logits_logps")
    else "_get_per_token_logps_and_entropies"
)
TIMES = ("runtime", "per_second", "time", "epoch", "learning_rate")  # of a log, which no two runs share

PROMPTS = [f"what is {i} plus {i + 1}?" for i in range(32)]
DATA = {
    "GRPO": {"prompt": PROMPTS},
    "RLOO": {"prompt": PROMPTS},
    "DPO": {
        "prompt": PROMPTS,
        "chosen": [f" it is {2 * i + 1}." for i in range(32)],
        "rejected": [" no idea, sorry."] * 32,
    },
    "KTO": {
        "prompt": PROMPTS,
        "completion": [f" it is {i}." for i in range(32)],
        "label": [i % 2 == 0 for i in range(32)],
    },
}

for algorithm in DATA:
    getattr(trl, f"{algorithm}Trainer")  # which TRL imports as it is first asked for


def make(algorithm, model, base=None, rows=32, **options):
    """A trainer; options are those of its config, but for these."""
    given = {name: options.pop(name) for name in ("peft_config", "compute_metrics") if name in options}
    settings = {**tiny.TRAINING, "output_dir": tempfile.mkdtemp(), "max_steps": 3, "logging_steps": 1}
    if algorithm in ("GRPO", "RLOO"):
        given["reward_funcs"] = tiny.reward
        settings |= {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 16,
            "beta": 0.04,
        }
    else:
        settings["per_device_train_batch_size"] = 4
    data = {name: values[:rows] for name, values in DATA[algorithm].items()}
    return (base or getattr(trl, f"{algorithm}Trainer"))(
        model=model,
        args=getattr(trl, f"{algorithm}Config")(**settings | options),
        train_dataset=Dataset.from_dict(data),
        eval_dataset=Dataset.from_dict({name: values[:4] for name, values in data.items()}),
        processing_class=tiny.make_tokenizer(),
        **given,
    )


def log_of(trainer):
    """Every number that was logged, but for times, step by step."""
    return [
        {name: float(x) for name, x in entry.items() if not any(time in name for time in TIMES)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def trained(*args, **options):
    """What a training logged, and its weights."""
    trainer = make(*args, **options)
    trainer.train()
    return log_of(trainer), {name: x.clone() for name, x in trainer.model.state_dict().items()}


class Widest(TorchDispatchMode):
    """How many rows of logits the largest tensor has that torch made."""

    def __init__(self, vocabulary=2048):  # that of tiny.make_model
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if not (isinstance(x, torch.Tensor) and x.dim() and x.is_floating_point()):
                continue
            if x.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, x.numel() // self.vocabulary)
        return result


def watched(trainer, vocabulary, seen):
    """A class of trainers; each of their losses appends to ``seen`` how many rows of logits it made."""

    class Watched(trainer):
        def _compute_loss(self, *args, **kwargs):
            with Widest(vocabulary) as widest:
                loss = super()._compute_loss(*args, **kwargs)
            seen.append(widest.rows)
            return loss

    return Watched


def check_same(ours, theirs, metric=2e-5, weight=2e-5):
    assert len(ours[0]) == len(theirs[0]) > 0
    for step, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert mine.keys() == other.keys(), f"step {step}"
        for name, value in mine.items():
            limit = metric * max(1, abs(other[name]))
            assert abs(value - other[name]) <= limit, f"step {step}: {name} {value} instead of {other[name]}"
    apart = max((ours[1][name] - x).abs().max().item() for name, x in theirs[1].items())
    assert apart <= weight, f"weights differ by {apart:.1e}"
