"""rlkernel.patch_trl(prefix_sharing=True): what is left to TRL is said, or refused; dropout on request."""

import logging
import warnings

import pytest
import torch
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import (
    COMPLETION,
    METHOD,
    PROMPT,
    SHUFFLE,
    assert_same_pass,
    one_pass,
    patch_trl,
    prefix,
    samples,
    trl,
)

import rlkernel
from rlkernel.prefix_batch import PrefixBatch

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer


def told(caught):
    return [str(w.message) for w in caught if "rlkernel" in str(w.message)]


def lora(**options):
    """The adapter that TRL's scripts make, whose dropout is 0.05 unless somebody says otherwise."""
    pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    return trl.get_peft_config(trl.ModelConfig(use_peft=True, **options))


# Warnings


def test_a_reason_is_told_once_and_all_are_summed_up(make_trainer, caplog):
    adapter = lora()
    assert adapter.lora_dropout == 0.05
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "rlkernel.patch_trl"):
        warnings.simplefilter("always")
        with patch_trl() as patch:
            make_trainer(peft_config=adapter, steps_per_generation=2, max_steps=2).train()
    (message,) = told(caught)
    assert f"leaves {METHOD} to TRL: {prefix.DROPOUT}" in message and "dropout='shared'" in message
    assert patch.fallbacks == {f"{METHOD}: {prefix.DROPOUT}": 3, f"{SHUFFLE}: {prefix.DROPOUT}": 1}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"4 were left to TRL\n  3 x {METHOD}: {prefix.DROPOUT}" in record.getMessage()


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
        utils.selective_log_softmax(logits, index)


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
    assert patch.fallbacks == {f"{METHOD}: {prefix.NOTHING}": 1}


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
    assert patch.fallbacks[f"{SHUFFLE}: {prefix.DROPOUT}"] == 2 and not patch.calls[SHUFFLE]
    assert len(stock.passes) == len(patched.passes) == 8
    for mine, other in zip(patched.passes, stock.passes, strict=True):
        assert torch.equal(mine.prompts, other.prompts)
    assert any(len(seen.prompts.unique(dim=0)) > 1 for seen in stock.passes)


# Dropout


def test_what_turns_dropout_off(make_trainer):
    """disable_dropout=True reaches modules, those of adapters too, and no attention that reads a number."""
    path = make_trainer().model.name_or_path
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(path, attention_dropout=0.1)
    for options, dropout, left in (
        ({"model": path, "peft_config": lora(), "disable_dropout": True}, "own", None),
        ({"model": model, "disable_dropout": True}, "own", prefix.ATTENTION_DROPOUT),
        ({"model": model}, "shared", prefix.ATTENTION_DROPOUT),  # attention has no shared draw
        ({"model": path, "model_init_kwargs": {"attention_dropout": 0.0}}, "own", None),
    ):
        with warnings.catch_warnings(record=True) as caught, patch_trl(dropout=dropout) as patch:
            warnings.simplefilter("always")
            make_trainer(max_steps=1, **options).train()
        messages = told(caught)
        assert len(messages) == (left is not None) and bool(patch.calls[METHOD]) == (left is None)
        assert all(left in text and "disable_dropout=True does not reach it" in text for text in messages)


def rows_of(ids, mask):
    """The row of the packed batch that runs each token of the padded one, -1 where none does."""
    batch = PrefixBatch.from_padded(ids[:, :PROMPT], mask[:, :PROMPT], ids[:, PROMPT:], mask[:, PROMPT:])
    rows = torch.full_like(ids, -1)
    own = torch.arange(batch.n_prefix, batch.total)
    rows[:, PROMPT - 1 : -1] = batch.unpack(own, fill=-1)
    start = 0
    for group in (slice(0, 4), slice(4, 8)):
        shared = int(mask[group, :PROMPT][0].sum()) - 1
        rows[group, PROMPT - 1 - shared : PROMPT - 1] = torch.arange(start, start + shared)
        start += shared
    known = rows >= 0
    assert start == batch.n_prefix and torch.equal(batch.input_ids[0][rows[known]], ids[known])
    return rows


def test_shared_dropout_is_one_draw_for_each_row(make_trainer):
    """Stock TRL with the draws of the packed rows for all tokens that they stand for: the same values."""
    with patch_trl(dropout="shared") as patch:
        trainer = make_trainer(peft_config=lora(lora_dropout=0.3))
        model = trainer.model.train()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.1) if "lora_B" in name else None
        ids, mask = samples()
        ids = ids % 40 * mask
        dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        draws = {}

        def remember(module, inputs, output):
            draws[module] = (output != 0) / (1 - module.p)

        hooks = [module.register_forward_hook(remember) for module in dropouts]
        packed = one_pass(trainer, model, ids, mask)
        for hook in hooks:
            hook.remove()
    assert not patch.fallbacks and len(draws) == len(dropouts) == 4
    rows = rows_of(ids, mask)
    for module, draw in draws.items():
        assert 0.6 < (draw > 0).float().mean() < 0.8
        module.forward = lambda x, draw=draw[0]: x * draw[rows]
    assert_same_pass(packed, one_pass(trainer, model, ids, mask))


def test_shared_dropout_draws_anew_for_each_row(make_trainer):
    """Two equal completions of a group have no draw in common but that of their prompt."""
    with patch_trl(dropout="shared"), torch.no_grad():
        trainer = make_trainer(peft_config=lora(lora_dropout=0.3))
        for name, parameter in trainer.model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.1) if "lora_B" in name else None
        ids, mask = samples(lengths=(6,) * 8)
        ids = (ids % 40 * mask)[:1].expand(4, -1)
        logps = getattr(trl.GRPOTrainer, METHOD)(
            trainer, trainer.model.train(), ids, mask[:4].clone(), COMPLETION
        )[0]
    assert len(logps.unique(dim=0)) == 4


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


# Models whose values are not those of a packed row


def test_neftune_is_left_to_trl(make_trainer):
    options = {"neftune_noise_alpha": 5.0, "steps_per_generation": 2, "max_steps": 2}
    stock = make_trainer(base=trl_trainers.recording(), **options)
    with rlkernel.patch_trl():
        stock.train()
    with patch_trl() as patch, pytest.warns(UserWarning, match="NEFTune"):
        noisy = make_trainer(base=trl_trainers.recording(), **options)
        noisy.train()
    assert not patch.calls[METHOD] and len(noisy.passes) == 2
    for mine, other in zip(noisy.passes, stock.passes, strict=True):
        assert torch.equal(mine.logps, other.logps) and torch.equal(mine.old, other.old)


def test_a_norm_after_rotary_positions(make_trainer, tmp_path):
    """HunYuan's positions are absolute, and TRL's count padding: its values are not a sample's own."""
    from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

    torch.manual_seed(0)
    config = HunYuanDenseV1Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = HunYuanDenseV1ForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1, 0.5) if "y_layernorm" in name else None
    trainer = make_trainer(model=model)
    for prompts, packs in (((9, 9), True), ((9, 5), False)):
        ids, mask = samples(prompts=prompts)
        inputs = ids % 64 * mask, mask
        stock = one_pass(trainer, model, *inputs)
        with warnings.catch_warnings(record=True) as caught, patch_trl() as patch:
            warnings.simplefilter("always")
            assert_same_pass(one_pass(trainer, model, *inputs), stock)
        assert patch.calls[METHOD] == packs and len(told(caught)) == 1 - packs
        reasons = " ".join(patch.fallbacks)
        assert packs or "its values are not those of the samples alone" in reasons
    alone = one_pass(trainer, model, *(x[4:5, PROMPT - 5 :] for x in inputs))
    assert (alone[0][0] - stock[0][0][4]).abs().max() > 1e-3
