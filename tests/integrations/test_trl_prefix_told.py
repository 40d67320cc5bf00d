"""rlkernel.patch_trl(prefix_sharing=True): what is left to TRL is said, or refused."""

import logging
import math
import warnings

import pytest
import torch
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import METHOD, SHUFFLE, patch_trl, trl
from trl_trainers import lora, told

import rlkernel
from rlkernel.integrations.trl import reasons

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer


def test_a_reason_is_told_once_and_all_are_summed_up(make_trainer, caplog):
    adapter = lora()
    assert adapter.lora_dropout == 0.05
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "rlkernel.patch_trl"):
        warnings.simplefilter("always")
        with patch_trl() as patch:
            make_trainer(peft_config=adapter, steps_per_generation=2, max_steps=2).train()
    (message,) = told(caught)
    assert f"leaves {METHOD} to TRL: {reasons.DROPOUT}" in message and "dropout='shared'" in message
    assert patch.fallbacks == {f"{METHOD}: {reasons.DROPOUT}": 3, f"{SHUFFLE}: {reasons.DROPOUT}": 1}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"4 were left to TRL\n  3 x {METHOD}: {reasons.DROPOUT}" in record.getMessage()


def test_nothing_to_say_is_no_warning(make_trainer, caplog):
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "rlkernel.patch_trl"):
        warnings.simplefilter("always")
        with patch_trl() as patch:
            make_trainer(max_steps=1).train()
    assert not told(caught) and [record.levelno for record in caplog.records] == [logging.INFO]
    assert f"{patch.calls.total()} calls ran on rlkernel, 0 were left to TRL" in caplog.text


def test_functions_that_are_left_to_trl_are_told_too():
    from trl.trainer import utils

    logits, index = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    reason = "leaves selective_log_softmax to TRL: logits are torch.float64"
    with rlkernel.patch_trl(), pytest.warns(UserWarning, match=reason):
        got = utils.selective_log_softmax(logits, index)
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx([-math.log(3)] * 2)


# require


def test_require_refuses_what_is_left_to_trl(make_trainer):
    with patch_trl(prefix_sharing="require"):
        make_trainer(max_steps=1).train()
    with (
        patch_trl(prefix_sharing="require"),
        pytest.raises(RuntimeError, match=r"must run packed .*'require'.*, got: dropout: .*dropout='shared'"),
    ):
        make_trainer(peft_config=lora(), max_steps=1).train()


def test_require_takes_a_batch_that_has_nothing_to_score(make_trainer):
    with patch_trl(prefix_sharing="require") as patch:
        make_trainer(max_steps=1, mask_truncated_completions=True, max_completion_length=1).train()
    assert patch.fallbacks == {f"{METHOD}: {reasons.NOTHING}": 1}


# Trainers that go another way


def overriding(way):
    class Other(trl.GRPOTrainer):
        pass

    def own(self, model, input_ids, attention_mask, logits_to_keep, *rest, **options):
        if way == "super":
            method = getattr(super(Other, self), METHOD)
            return method(model, input_ids, attention_mask, logits_to_keep, *rest, **options)
        logits = model(input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        return logps, torch.zeros_like(logps), None

    def loss(self, model, inputs):
        logps, _, _ = own(self, model, inputs["completion_ids"], inputs["completion_mask"], 4)
        return -(logps * inputs["advantages"][:, None]).mean()

    if way == "loss":
        Other._compute_loss = loss
    else:
        setattr(Other, METHOD, own)
    return Other


@pytest.mark.parametrize(
    "way, reason",
    [("own", "Other overrides it"), ("loss", "Other computes its loss without it"), ("super", None)],
)
def test_a_subclass_of_another_way_is_reported(make_trainer, way, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with patch_trl() as patch:
            make_trainer(base=overriding(way), max_steps=2).train()
    if reason is None:
        assert not patch.fallbacks and patch.calls[METHOD] == 2
        return
    assert told(caught) == [f"rlkernel.patch_trl() leaves {METHOD} to TRL: {reason}"]
    # known after the first step: the second one's samples are shuffled as in TRL
    assert patch.fallbacks == {f"{METHOD}: {reason}": 2, f"{SHUFFLE}: {reason}": 1}
    with patch_trl(prefix_sharing="require"), pytest.raises(RuntimeError, match=f"must run packed.*{reason}"):
        make_trainer(base=overriding(way), max_steps=1).train()


def test_shuffle_stays_trls_where_the_model_cannot_pack(make_trainer):
    options = {"peft_config": lora(), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    stock = make_trainer(base=trl_trainers.recording(), max_steps=2, **options)
    stock.train()
    with patch_trl() as patch:
        patched = make_trainer(base=trl_trainers.recording(), max_steps=2, **options)
        patched.train()
    assert patch.fallbacks[f"{SHUFFLE}: {reasons.DROPOUT}"] == 2 and not patch.calls[SHUFFLE]
    assert len(stock.passes) == len(patched.passes) == 8
    for mine, other in zip(patched.passes, stock.passes, strict=True):
        assert torch.equal(mine.prompts, other.prompts)
    assert any(len(seen.prompts.unique(dim=0)) > 1 for seen in stock.passes)


# Options


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefix_sharing": "yes"}, "prefix_sharing must be True, False or 'require', got 'yes'"),
        ({"dropout": "none", "prefix_sharing": True}, "dropout must be 'own' or 'shared', got 'none'"),
        ({"dropout": "shared"}, "dropout must be 'own' without prefix_sharing, got 'shared'"),
        ({"strict": 0}, "strict must be True or False, got 0"),
    ],
)
def test_options_are_validated(options, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.patch_trl(**options)


def test_a_standing_patch_has_its_options():
    from rlkernel.integrations._patch import PatchError

    with patch_trl(dropout="shared"):
        assert rlkernel.patch_trl().prefix is not None
        with pytest.raises(PatchError, match="dropout must be .* shared, got own"):
            patch_trl()
        with pytest.raises(PatchError, match="prefix_sharing must be .* True, got require"):
            patch_trl(prefix_sharing="require", dropout="shared")
