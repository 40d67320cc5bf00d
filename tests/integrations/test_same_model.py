"""Engines that made another model than transformers are found by their numbers of parameters."""

import pytest
import torch

from rlkernel.integrations._same_model import check_parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


class Padded(torch.nn.Embedding):
    """As an engine pads a vocabulary."""

    def __init__(self, rows, width):
        super().__init__(rows + 14, width)
        self.org_vocab_size = rows


def engines(config):
    model = transformers.AutoModelForCausalLM.from_config(config)
    embedding = model.model.embed_tokens = Padded(50, 16)
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = embedding.weight if config.tie_word_embeddings else Padded(50, 16).weight
    model.lm_head.org_vocab_size = 50
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.Qwen3Config])
def test_the_same_model_is_taken(kind, tied):
    config = kind(**SIZES, tie_word_embeddings=tied)
    model = engines(config)
    assert check_parameters(model, config, "it") is None
    config.tie_word_embeddings = not tied
    with pytest.raises(ValueError, match="must have the model that transformers makes, of .*, got"):
        check_parameters(model, config, "it")


@pytest.mark.parametrize(
    ("kind", "setting", "fewer"),
    [
        (transformers.LlamaConfig, "mlp_bias", 2 * (24 + 24 + 16)),
        (transformers.Qwen3Config, "attention_bias", 2 * (16 + 8 + 8 + 16)),
    ],
)
def test_a_setting_that_is_passed_over_is_told(kind, setting, fewer):
    config = kind(**SIZES)
    model = engines(config)
    total = sum(p.numel() for p in model.parameters()) - 14 * 16 * (1 if config.tie_word_embeddings else 2)
    setattr(config, setting, True)
    said = f"of {total + fewer:,} parameters, got {total:,}: vLLM passes over a setting of {kind.__name__}"
    with pytest.raises(ValueError, match=said):
        check_parameters(model, config, "vLLM")
