"""rlkernel.patch_trl(prefix_sharing=True): what a model is on comes back, and goes with its copies."""

import copy
import zipfile

import pytest
import torch
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import METHOD, UPSTREAM, patch_trl, samples, trl

from rlkernel.integrations import hf
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.trl.models import Models

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer


def trained(make_trainer, **options):
    trainer = make_trainer(max_steps=1, **options)
    trainer.train()
    assert hf.is_registered(trainer.model.config._attn_implementation)
    return trainer.model


def test_copies_and_files_are_on_what_the_model_was_on(make_trainer, tmp_path):
    ids = samples()[0] % 40
    with patch_trl():
        model = trained(make_trainer)
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        assert copied.config._attn_implementation == "sdpa"
        assert hf.is_registered(model.config._attn_implementation)  # which stays where it is
    assert model.config._attn_implementation == "sdpa"
    with zipfile.ZipFile(tmp_path / "model.pt") as file:
        (pickled,) = [file.read(name) for name in file.namelist() if name.endswith("data.pkl")]
    assert b"rlkernel" not in pickled  # it loads where there is none
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_a_choice_under_the_patch_stays(make_trainer):
    with patch_trl():
        model = trained(make_trainer, model_init_kwargs={"attn_implementation": "eager"})
        model.set_attn_implementation("sdpa")
        assert copy.deepcopy(model).config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    with patch_trl():
        model = trained(make_trainer, model_init_kwargs={"attn_implementation": "eager"})
    assert model.config._attn_implementation == "eager"


def test_parts_get_back_what_each_was_on():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})

    def names(model):
        parts = model.config, model.config.text_config, model.config.vision_config
        return [part._attn_implementation for part in parts]

    before = names(model)
    assert before[1:] == ["sdpa", "eager"]
    models = Models()
    models.attach(model)
    assert hf.is_registered(names(model)[1]) and names(copy.deepcopy(model)) == before
    models.undo()
    assert names(model) == before


def test_undo_over_somebody_else_leaves_models_alone(make_trainer, monkeypatch):
    patch = patch_trl()
    model = trained(make_trainer)
    with monkeypatch.context() as other:
        other.setattr(trl.GRPOTrainer, METHOD, lambda self: None)
        with pytest.raises(PatchError, match=f"cannot undo .*{METHOD}"):
            patch.undo()
        assert patch.active and hf.is_registered(model.config._attn_implementation)
    patch.undo()
    assert model.config._attn_implementation == "sdpa" and vars(trl.GRPOTrainer)[METHOD] is UPSTREAM[METHOD]


def test_the_same_patch_serves_a_second_training(make_trainer):
    with patch_trl() as patch:
        model = trained(make_trainer)
    with patch_trl():
        pass
    with patch:
        assert trained(make_trainer) is not model and patch.calls[METHOD] == 2
    assert not patch.active
