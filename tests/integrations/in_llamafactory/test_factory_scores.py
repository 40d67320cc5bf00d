"""The sums, their gradients and the logs of single calls; which logits are made, and what is left."""

import types
import warnings

import factory
import pytest
import tiny
import torch
from doors import Logits
from llamafactory.train import trainer_utils
from llamafactory.v1.trainers.sft_trainer import SFTTrainer

import rlkernel


def batch_of(trainer, eval_dataset=False):
    loader = trainer.get_eval_dataloader() if eval_dataset else trainer.get_train_dataloader()
    return next(iter(loader))


def step(trainer):
    """Loss, metrics and gradients of one batch, and how many rows of logits its widest tensor has."""
    trainer.model.zero_grad()
    with Logits(factory.VOCAB) as seen:
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch_of(trainer))
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), metrics, gradients, seen.rows


def check_step(ours, stock, metric=1e-5):
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-6)
    assert ours[1].keys() == stock[1].keys()
    for name, value in stock[1].items():
        assert ours[1][name] == pytest.approx(value, rel=metric, abs=metric), name
    assert ours[2].keys() == stock[2].keys() and ours[2]
    for name, gradient in stock[2].items():
        torch.testing.assert_close(ours[2][name], gradient, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_no_logits(model_path, stage):
    """LLaMA-Factory makes those of the whole batch; what is made here are tiles, and a row of probes."""
    trainer = factory.make(stage, factory.model_of(model_path), factory.model_of(model_path))
    stock = step(trainer)
    rows = sum(x.numel() for name, x in batch_of(trainer).items() if name == "input_ids")
    assert stock[3] >= rows - len(batch_of(trainer)["input_ids"])
    with rlkernel.patch_llamafactory() as patch:
        step(trainer)  # in which an lm_head is looked at once
        monitored = step(trainer)
    assert monitored[3] < rows / 2 and not patch.fallbacks
    check_step(monitored, stock)


@pytest.mark.parametrize("cap", [None, 0.8])
def test_means_of_all_logits_with_a_bias_and_a_cap(cap):
    """Those of prompts and padding, too, which no label asks for."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=factory.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, final_logit_softcapping=cap,
        pad_token_id=tiny.PAD, bos_token_id=tiny.BOS, eos_token_id=tiny.EOS, tie_word_embeddings=False,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    model.lm_head.bias = torch.nn.Parameter(0.1 + torch.randn(factory.VOCAB))
    trainer = factory.make("dpo", model, pref_loss="simpo")
    stock = step(trainer)
    assert abs(stock[1]["logits/chosen"]) > 0.01
    with rlkernel.patch_llamafactory(["dpo"]) as patch:
        check_step(step(trainer), stock)
    assert not patch.fallbacks


def test_in_bf16(model_path):
    """The logits of a bf16 model are bf16 themselves, and rlkernel's log-probabilities are not rounded so."""
    exact = step(factory.make("dpo", factory.model_of(model_path), pref_loss="orpo"))
    trainer = factory.make("dpo", factory.model_of(model_path, dtype=torch.bfloat16), pref_loss="orpo")
    stock = step(trainer)
    with rlkernel.patch_llamafactory() as patch:
        ours = step(trainer)
    assert not patch.fallbacks
    for name in ("logps/chosen", "logps/rejected", "logits/chosen"):
        error, theirs = abs(ours[1][name] - exact[1][name]), abs(stock[1][name] - exact[1][name])
        assert error <= 1.5 * theirs + 1e-3, name


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_evaluation_logs_the_same(model_path, stage):
    found = []

    def evaluate():
        trainer = factory.make(
            stage, factory.model_of(model_path), factory.model_of(model_path),
            settings={"per_device_eval_batch_size": 3},
        )  # fmt: skip
        found.append(trainer.evaluate())

    evaluate()
    with rlkernel.patch_llamafactory() as patch:
        evaluate()
    assert patch.calls and not patch.fallbacks
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        if not any(time in name for time in (*factory.TIMES, "preparation")):
            assert found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("ld_alpha", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_there_are(ld_alpha, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, 50, generator=generator).to(dtype)
    labels = torch.randint(0, 50, (4, 9), generator=generator)
    labels[:, :3], labels[1, 6:] = factory.IGNORED, factory.IGNORED
    found = []

    def call(x):
        x = x.clone().requires_grad_()
        logps, lengths = trainer_utils.get_batch_logps(x.float(), labels, ld_alpha=ld_alpha)
        (gradient,) = torch.autograd.grad((logps * torch.arange(1.0, 5)).sum(), x)
        found.append((logps.detach(), lengths, gradient))

    call(logits)
    with rlkernel.patch_llamafactory(["logprobs"]) as patch:
        call(logits)
        assert patch.calls == {"get_batch_logps": 1}
        with pytest.warns(UserWarning, match="leaves get_batch_logps .*: logits is torch.float64"):
            trainer_utils.get_batch_logps(logits.double(), labels)
        with pytest.raises(ValueError, match="must have the same shape"):
            trainer_utils.get_batch_logps(logits.float(), labels[:, 1:])
    for stock, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


def test_log_probs_of_v1(model_path):
    """Whose models make a loss besides, which nobody reads."""
    trainer, model = object.__new__(SFTTrainer), factory.model_of(model_path)
    trainer.device, trainer.model = torch.device("cpu"), model
    ids = torch.randint(4, 40, (8, 33), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :5] = factory.IGNORED
    batch = {"input_ids": ids, "labels": labels, "loss_weights": (labels >= 0) * torch.rand(8, 33)}

    def run():
        model.zero_grad()
        with Logits(factory.VOCAB) as seen:
            loss = trainer.compute_loss(dict(batch))
            loss.backward()
        return loss.detach(), model.lm_head.weight.grad.clone(), seen.rows

    stock = run()
    with rlkernel.workspace.limited(2**20), rlkernel.patch_llamafactory(["v1"]) as patch:  # tiles of 128 rows
        run()
        ours = run()
    assert patch.calls == {"BaseTrainer.compute_log_probs": 2} and not patch.fallbacks
    assert stock[2] >= ids.numel() > 2 * ours[2]
    for mine, theirs in zip(ours[:2], stock[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# what is left


class Louder(torch.nn.Module):
    """A model's lm_head that is no linear layer."""

    def __init__(self, head):
        super().__init__()
        self.head, self.weight = head, head.weight

    def forward(self, hidden):
        return 1.5 * self.head(hidden)


def other_head(model):
    model.lm_head = Louder(model.lm_head)
    return "its lm_head must be a torch.nn.Linear, got test_factory_scores.Louder"


def other_logits(model):
    """Which no config tells of, and the first call shows."""
    stock = type(model).forward

    def forward(self, *args, **kwargs):
        output = stock(self, *args, **kwargs)
        output.logits = 1.5 * output.logits
        return output

    model.forward = types.MethodType(forward, model)
    return "its logits must be scaled by 1.0"


@pytest.mark.parametrize("change", [other_head, other_logits])
@pytest.mark.parametrize("options", [{}, {"pref_loss": "simpo"}], ids=str)
def test_a_model_that_is_left(model_path, change, options):
    """Its logits are scored instead, of which the labels must still be there without a reference."""
    model = factory.model_of(model_path)
    reason = change(model)
    trainer = factory.make("dpo", model, None if options else factory.model_of(model_path), **options)
    stock = step(trainer)
    with rlkernel.patch_llamafactory() as patch, pytest.warns(UserWarning, match=reason):
        check_step(step(trainer), stock)
    assert patch.calls["get_batch_logps"] == 1
    assert patch.fallbacks.total() == 1 and reason in str(patch.fallbacks)


@pytest.mark.parametrize("kind", ["hinge", "ipo", "kto_pair"])
def test_a_kind_of_loss_that_trl_does_not_hear_of(model_path, kind):
    """A defect of LLaMA-Factory with TRL from 0.20: each of these trains as sigmoid, which is told."""
    trainer = factory.make("dpo", factory.model_of(model_path), factory.model_of(model_path), pref_loss=kind)
    batch = batch_of(trainer)
    stock = trainer.get_batch_loss_metrics(trainer.model, batch)[0]
    sums = [torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -4.5]), torch.tensor([-3.5, -5.0])]
    losses = trainer.dpo_loss(*sums, sums[1])[0]
    logits = 0.1 * (sums[0] - sums[1] - sums[2] + sums[1])
    assert torch.equal(losses, -torch.nn.functional.logsigmoid(logits)), "not sigmoid any more"
    told = f"computes 'sigmoid' for pref_loss: {kind}"
    with rlkernel.patch_llamafactory() as patch, pytest.warns(UserWarning, match=told):
        ours = trainer.get_batch_loss_metrics(trainer.model, batch)[0]
        assert patch.calls == {"CustomDPOTrainer.concatenated_forward": 2}
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"use_eaft_loss": True}, "EAFT weighs by the likeliest logits"),
        ({"use_asft_loss": True}, "ASFT compares whole distributions"),
        ({}, None),
    ],
    ids=str,
)
def test_losses_of_sft_that_are_left(model_path, options, reason):
    reference = factory.model_of(model_path) if "use_asft_loss" in options else None
    trainer = factory.make("sft", factory.model_of(model_path), reference, **options)
    stock = trainer.compute_loss(trainer.model, batch_of(trainer))
    with rlkernel.patch_llamafactory() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(trainer.compute_loss(trainer.model, batch_of(trainer)), stock)
    assert not patch.calls and (reason in str(patch.fallbacks) if reason else not patch.fallbacks)


def test_dft_with_its_outputs(model_path):
    """As evaluations ask for them: of logits there are none where they are scored."""
    trainer = factory.make("sft", factory.model_of(model_path), use_dft_loss=True)
    stock = trainer.evaluate()["eval_loss"]
    with rlkernel.patch_llamafactory() as patch:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(stock, rel=1e-6)
    assert "the logits are asked for" in str(patch.fallbacks) and not patch.calls


def test_a_trainer_that_does_more_with_logits(model_path):
    trainer = factory.make("dpo", factory.model_of(model_path), factory.model_of(model_path))
    with rlkernel.patch_llamafactory():
        logits = trainer.concatenated_forward(trainer.model, batch_of(trainer))["chosen_logits"]
        for call in (torch.softmax, torch.argmax):
            with pytest.raises(
                RuntimeError, match=f"what rlkernel.patch_llamafactory.. knows, got {call.__name__}"
            ):
                call(logits, -1)
