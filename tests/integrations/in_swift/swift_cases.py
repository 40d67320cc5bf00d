"""Trainings of a tiny model by SWIFT's own command, in this process, and what they logged."""

import contextlib
import functools
import warnings

import pytest
import tiny
import torch
from doors import Door, Logits
from swift.arguments.sft_args import SftArguments
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms

import rlkernel
from rlkernel.integrations.swift import SwiftPatch, contract, switch

DOOR = Door(
    rlkernel.patch_swift, SwiftPatch, "swift", contract.FRAMEWORK, contract.SUPPORTED, switch, switch.OWN,
    distribution="ms-swift",
)  # fmt: skip
upstream, nothing_left_behind = DOOR.fixtures()
VOCABULARY, LARGE = 61, 8192
TIMES = ("time", "runtime", "per_second")  # of a log, which no two runs share
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SETTINGS = {
    "model_type": "qwen2", "template": "dummy", "torch_dtype": "float32", "bf16": False, "attn_impl": "sdpa",
    "tuner_type": "full", "use_cpu": True, "max_steps": 3, "logging_steps": 1, "seed": 0,
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2, "optim": "sgd", "report_to": "none", "save_strategy": "no", "eval_strategy": "no",
    "split_dataset_ratio": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0,
    "load_from_cache_file": False,
}  # fmt: skip
OF_GROUPS = {
    "reward_funcs": "letters", "num_generations": 4, "max_completion_length": 12, "beta": 0.04,
    "log_entropy": True, "temperature": 0.7, "num_iterations": 2,
}  # fmt: skip


class Letters(ORM):
    def __call__(self, completions, **_):
        return tiny.reward(completions)


orms["letters"] = Letters


def save(path, vocabulary=VOCABULARY, scale=1.0):
    """A model with its tokenizer; ``scale``: of its parameters, as all that are saved are alike."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = CHAT
    model = tiny.make_model(vocab=vocabulary, hidden=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def arguments(kind, files, **options):
    """Of ``swift rlhf``."""
    of_kind = OF_GROUPS if kind == "grpo" else {}
    output = {"rlhf_type": kind, "model": files / "model", "dataset": files / "rows.jsonl"}
    given = output | {"output_dir": files / "output"} | SETTINGS | of_kind | options
    return [x for name, value in given.items() for x in (f"--{name}", *_words(value))]


def _words(value):
    if isinstance(value, list):
        return map(str, value)
    return (str(value).lower() if isinstance(value, bool) else str(value),)


class Kept(SwiftRLHF):
    """What ``swift rlhf`` runs, with its trainer."""

    def train(self, trainer):
        self.trainer = trainer
        self.prepare()
        return super().train(trainer)

    def prepare(self):
        pass


def trained(kind, files, change=None, run=Kept, **options):
    """What a training logged, and its weights; ``change`` is made to the trainer before it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        training = run(arguments(kind, files, **options))
        training.prepare = lambda: change and change(training.trainer)
        result = training.main()
    log = [
        {name: float(x) for name, x in entry.items() if not any(time in name for time in TIMES)}
        for entry in result["log_history"]
        if "loss" in entry or "eval_loss" in entry
    ]
    return log, {name: x.clone() for name, x in training.trainer.model.state_dict().items()}


@functools.cache
def _stock(kind, files, options):
    return trained(kind, files, **dict(options))


def stock(kind, files, **options):
    """``trained`` without a patch, once."""
    return _stock(kind, files, tuple(options.items()))


def check_same(ours, theirs, limit=1e-5):
    assert len(ours[0]) == len(theirs[0]) > 0
    for step, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert mine.keys() == other.keys(), f"step {step}"
        for name, value in mine.items():
            allowed = limit * max(1, abs(other[name]))
            assert abs(value - other[name]) <= allowed, f"step {step}: {name} {value} not {other[name]}"
    assert ours[1].keys() == theirs[1].keys()
    apart = max((ours[1][name] - x).abs().max().item() for name, x in theirs[1].items())
    assert apart <= limit, f"weights differ by {apart:.1e}"


def check_trained(kind, files, calls, **options):
    """A training is the same with the patch, whose calls these are, and has nothing left; the patch."""
    theirs = stock(kind, files, **options)
    assert any(entry["grad_norm"] for entry in theirs[0])
    with rlkernel.patch_swift() as patch:
        ours = trained(kind, files, **options)
    assert set(patch.calls) == set(calls) and not patch.fallbacks, (patch.calls, patch.fallbacks)
    check_same(ours, theirs)
    return patch


def check_left(kind, files, name, reason, change=None, **options):
    """A training has with the patch what it has without, and ``name`` is left to SWIFT for ``reason``."""
    theirs = trained(kind, files, change, **options)
    with pytest.warns(UserWarning, match=f"leaves {name} to SWIFT: .*{reason}"):
        patch = rlkernel.patch_swift()
        with patch:
            ours = trained(kind, files, change, **options)
    assert not patch.calls[name] and any(reason in key for key in patch.fallbacks), patch.fallbacks
    check_same(ours, theirs)


@contextlib.contextmanager
def without_flash_attention():
    """Inside, samples may be packed for sdpa, which tells them apart by their positions."""
    before = SftArguments._check_padding_free
    SftArguments._check_padding_free = lambda self: None
    try:
        yield
    finally:
        SftArguments._check_padding_free = before


def widest(kind, files):
    """The most rows of logits that a step makes, but for the rollouts."""
    seen, model = Logits(LARGE), files / "large"
    if not model.exists():
        save(model, LARGE)

    def change(trainer):
        step = trainer.training_step

        def watched(*args, **kwargs):
            with seen:
                return step(*args, **kwargs)

        trainer.training_step = watched
        if kind == "grpo":  # its rollout samples from logits
            prepare = trainer._prepare_inputs
            trainer._prepare_inputs = lambda *args: _unseen(seen, prepare, *args)

    trained(kind, files, change, max_steps=1, model=model)
    return seen.rows


def _unseen(seen, call, *args):
    rows = seen.rows
    try:
        return call(*args)
    finally:
        seen.rows = rows
