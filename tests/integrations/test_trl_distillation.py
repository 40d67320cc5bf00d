"""patch_trl() under the real GKDTrainer and GOLDTrainer: their loss by divergence, whenever their modules are
imported."""

import subprocess
import sys
import warnings

import pytest
import tiny
import torch
from bitwise import assert_equal

import rlkernel

pytest.importorskip("trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that what is experimental may change
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

LABELS = torch.tensor([[5, -100, 3, 2, 1, -100], [-100, -100, 3, 2, 1, 9]])


def logits(dtype=torch.float32):
    g = torch.Generator().manual_seed(4)
    return [(2 * torch.randn(2, 6, 43, generator=g)).to(dtype) for _ in range(2)]


def run(student, teacher, trainer=GKDTrainer, **options):
    leaf = student.clone().requires_grad_()
    loss = trainer.generalized_jsd_loss(leaf, teacher, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("trainer", [GKDTrainer, GOLDTrainer])
@pytest.mark.parametrize("options", [
    {}, {"labels": LABELS}, {"labels": LABELS, "reduction": "sum", "beta": 0.1},
    {"reduction": "mean", "beta": 1},
    {"labels": LABELS, "reduction": "mean", "beta": 0}, {"labels": LABELS, "num_items_in_batch": 7},
    {"labels": LABELS, "num_items_in_batch": torch.tensor(9), "temperature": 0.4},
    {"labels": torch.full((2, 6), -100)},
], ids=str)  # fmt: skip
def test_its_loss_is_trls(options, trainer):
    """Against TRL's in fp64, at most twice as far from it as TRL's in fp32."""
    options = options | {"trainer": trainer}
    want, stock = run(*logits(torch.float64), **options), run(*logits(), **options)
    with rlkernel.patch_trl(vllm=False) as patch:
        found = run(*logits(), **options)
        assert patch.calls[f"{trainer.__name__}.generalized_jsd_loss"] == 1 and not patch.fallbacks
    for ours, theirs, exact in zip(found, stock, want, strict=True):
        lost = (theirs.double() - exact).abs().max()
        assert (ours.double() - exact).abs().max() <= 2 * lost + 2e-7 * exact.abs().max()
    again = run(*logits(), **options)
    assert_equal("loss without the patch", again[0], stock[0])


def test_narrow_logits_are_computed_in_fp32():
    want = run(*(x.double() for x in logits(torch.bfloat16)), labels=LABELS)
    stock = run(*logits(torch.bfloat16), labels=LABELS)
    with rlkernel.patch_trl(vllm=False):
        loss, grad = run(*logits(torch.bfloat16), labels=LABELS)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert abs(loss - want[0]) < 1e-6 < abs(stock[0] - want[0])
    assert (grad - want[1]).abs().max() < 0.5 * (stock[1] - want[1]).abs().max()


def test_what_is_left_to_trl():
    student, teacher = logits()
    left = {
        "student_logits is torch.float64": dict(
            student_logits=student.double(), teacher_logits=teacher.double()
        ),
        "teacher_logits requires a gradient": dict(teacher_logits=teacher.clone().requires_grad_()),
        "reduction is 'none'": dict(reduction="none"),
        "the temperature is no number above 0": dict(temperature=torch.tensor(0.5)),
    }
    for reason, change in left.items():
        given = dict(student_logits=student, teacher_logits=teacher) | change
        want = GKDTrainer.generalized_jsd_loss(**given)
        with rlkernel.patch_trl(vllm=False) as patch, pytest.warns(UserWarning, match=reason):
            assert_equal(reason, GKDTrainer.generalized_jsd_loss(**given).detach(), want.detach())
        assert patch.fallbacks == {f"GKDTrainer.generalized_jsd_loss: {reason}": 1}
    given = dict(
        student_logits=student.softmax(-1), teacher_logits=teacher.softmax(-1), logits_are_probs=True
    )
    want = GOLDTrainer.generalized_jsd_loss(**given)
    with rlkernel.patch_trl(vllm=False), pytest.warns(UserWarning, match="logits_are_probs is set"):
        assert_equal("of two tokenizers", GOLDTrainer.generalized_jsd_loss(**given), want)


def byte_tokenizer():
    """Of bytes, as GOLD wants one even where teacher and student have the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.mark.parametrize(("kind", "config"), [(GKDTrainer, GKDConfig), (GOLDTrainer, GOLDConfig)])
def test_training_is_trls(tmp_path, kind, config):
    """Three steps on completions that the student draws itself, and on those of the data."""
    from datasets import Dataset

    tiny.make_model().save_pretrained(tmp_path / "student")
    tiny.make_model(hidden=32).save_pretrained(tmp_path / "teacher")
    said = [
        [
            {"role": "user", "content": "abc"[: 1 + i % 3]},
            {"role": "assistant", "content": "d e f g"[: 2 + i % 5]},
        ]
        for i in range(12)
    ]
    tokenizer = tiny.make_tokenizer() if kind is GKDTrainer else byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"
    )

    length = "max_new_tokens" if kind is GKDTrainer else "max_completion_length"

    def train(lmbda):
        trainer = kind(
            model=str(tmp_path / "student"), teacher_model=str(tmp_path / "teacher"),
            args=config(
                **tiny.TRAINING
                | {"output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 4},
                lmbda=lmbda, beta=0.3, temperature=0.9,
                **{length: 6},
            ),
            train_dataset=Dataset.from_dict({"messages": said}), processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
        return losses, {k: x.clone() for k, x in trainer.model.state_dict().items()}

    for lmbda in (0.0, 1.0):
        theirs = train(lmbda)
        with rlkernel.patch_trl(vllm=False) as patch:
            ours = train(lmbda)
        assert patch.calls[f"{kind.__name__}.generalized_jsd_loss"] >= 3 and not patch.fallbacks
        assert len(ours[0]) == 3 and ours[0] == pytest.approx(theirs[0], abs=1e-5)
        assert max((ours[1][k] - x).abs().max().item() for k, x in theirs[1].items()) < 2e-4


WAITS = """
import sys, rlkernel
patch = rlkernel.patch_trl(vllm=False)
assert "trl.experimental.gkd.gkd_trainer" not in sys.modules
import trl.experimental.gkd.gkd_trainer as gkd
stock = patch._done[-1].expected
assert vars(gkd.GKDTrainer)["generalized_jsd_loss"] is not stock
assert "divergence" in repr(patch)
patch.undo()
assert vars(gkd.GKDTrainer)["generalized_jsd_loss"] is stock
with patch:
    assert vars(gkd.GKDTrainer)["generalized_jsd_loss"] is not stock
assert vars(gkd.GKDTrainer)["generalized_jsd_loss"] is stock
"""


def test_its_module_is_waited_for():
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", WAITS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
