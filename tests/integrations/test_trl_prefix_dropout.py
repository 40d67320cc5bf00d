"""rlkernel.patch_trl(prefix_sharing=True): models that draw noise, or whose positions are absolute."""

import warnings

import pytest
import torch
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import (
    COMPLETION,
    METHOD,
    PROMPT,
    assert_same_pass,
    one_pass,
    patch_trl,
    samples,
    trl,
)
from trl_trainers import lora, told

import rlkernel
from rlkernel.integrations.trl import reasons
from rlkernel.prefix.batch import PrefixBatch

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer


def test_what_turns_dropout_off(make_trainer):
    """disable_dropout=True reaches modules, those of adapters too, and no attention that reads a number."""
    path = make_trainer().model.name_or_path
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(path, attention_dropout=0.1)
    for options, dropout, left in (
        ({"model": path, "peft_config": lora(), "disable_dropout": True}, "own", None),
        ({"model": model, "disable_dropout": True}, "own", reasons.ATTENTION_DROPOUT),
        ({"model": model}, "shared", reasons.ATTENTION_DROPOUT),  # attention has no shared draw
        ({"model": path, "model_init_kwargs": {"attention_dropout": 0.0}}, "own", None),
    ):
        with warnings.catch_warnings(record=True) as caught, patch_trl(dropout=dropout) as patch:
            warnings.simplefilter("always")
            make_trainer(max_steps=1, **options).train()
        messages = told(caught)
        assert len(messages) == (left is not None) and bool(patch.calls[METHOD]) == (left is None)
        assert all(left in text and "disable_dropout=True does not reach it" in text for text in messages)


def test_dropout_of_attention_by_another_name(make_trainer):
    """BioGPT's config calls it attention_probs_dropout_prob, its module dropout; it has no shared draw."""
    from transformers import BioGptConfig, BioGptForCausalLM

    config = BioGptConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    model, trainer = BioGptForCausalLM(config), make_trainer()
    with patch_trl(dropout="shared") as patch:
        assert patch.prefix.refusal(trainer, model.eval()) is None
        assert reasons.ATTENTION_DROPOUT in patch.prefix.refusal(trainer, model.train())


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


# What is left to TRL whatever dropout is


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
